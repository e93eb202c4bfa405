// Starts an episode without a time limit, and waits until its page is ready. Returns the instruction.
(seed) =>
  new Promise((done) => {
    core.EPISODE_MAX_TIME = 86400000;
    if (window.jQuery) jQuery.fx.off = true;
    Math.seedrandom(seed);
    core.startEpisodeReal();
    window.expertClicked = false;
    const wait = () => (WOB_TASK_READY ? done(core.getUtterance()) : setTimeout(wait, 10));
    wait();
  })
