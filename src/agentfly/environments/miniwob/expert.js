// The expert's next action on the page of a MiniWoB++ task: {click: [x, y]} or {type: text}.
// Each task has a function that lists what must hold, in order; the first unmet item decides the action.
(task) => {
  const query = core.getUtterance();
  const quoted = [...query.matchAll(/"([^"]*)"/g)].map((found) => found[1]);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const text = (element) => element.textContent.trim();
  const named = (selector, name) => all(selector).find((element) => text(element) === name);
  const click = (element) => {
    const box = element.getBoundingClientRect();
    return { click: [Math.round(box.left + box.width / 2), Math.round(box.top + box.height / 2)] };
  };
  const fill = (selector, value) => {
    const input = document.querySelector(selector);
    if (input.value === value) return null;
    return document.activeElement === input ? { type: value } : click(input);
  };
  const submit = () => click(document.querySelector("#subbtn, #submit"));
  const first = (...steps) => steps.reduce((action, step) => action || step(), null);
  // The instruction is "Select a, b and click Submit."; nothing may be wanted.
  const select = () => {
    const wanted = query.replace(/^Select /, "").replace(/ and click Submit\.$/, "").split(", ");
    const label = all("#area label").find((each) => {
      const input = each.querySelector("input");
      return input.checked !== wanted.includes(text(each)) && (input.type === "checkbox" || !input.checked);
    });
    return label ? click(label.querySelector("input")) : submit();
  };
  const button = () => click(named("#area button, #area .alink", quoted[0]));
  const subbtn = () => click(document.querySelector("#subbtn"));
  const experts = {
    "click-test": subbtn,
    "click-test-2": subbtn,
    "click-test-transfer": subbtn,
    "click-button": button,
    "unicode-test": button,
    "click-link": button,
    "click-button-sequence": () => click(document.querySelector(window.expertClicked ? "#subbtn2" : "#subbtn")),
    "click-dialog": () => click(document.querySelector("button.ui-button")),
    "click-dialog-2": () =>
      click(quoted[0] === "x" ? document.querySelector(".ui-dialog-titlebar button") : named(".ui-dialog button", quoted[0])),
    "click-tab": () => click(named("#area ul a", query.match(/Tab #\d/)[0])),
    "click-option": select,
    "click-checkboxes": select,
    "click-checkboxes-transfer": select,
    "click-color": () => click(document.querySelector(`#area [data-color="${query.match(/the (\w+) colored/)[1]}"]`)),
    "click-widget": () => click(document.querySelector(`#area [data-type="${quoted[0]}"]`)),
    "enter-text": () => first(() => fill("#tt", quoted[0]), submit),
    "enter-text-dynamic": () => first(() => fill("#tt", quoted[0]), submit),
    "enter-password": () => first(() => fill("#password", quoted[0]), () => fill("#verify", quoted[0]), submit),
    "login-user": () => first(() => fill("#username", quoted[0]), () => fill("#password", quoted[1]), submit),
    "focus-text": () => click(document.querySelector("#tt")),
    "focus-text-2": () => click(all("#area input")[parseInt(query.match(/\d+/)[0]) - 1]),
    "simple-arithmetic": () => {
      const [a, sign, b] = text(document.querySelector("#math-problem")).split(" ");
      const value = { "+": +a + +b, "-": a - b, x: a * b }[sign];
      return first(() => fill("#math-answer", String(value)), submit);
    },
    "find-word": () => {
      const words = text(document.querySelector("#area p")).split(/\s+/);
      return first(() => fill("#answer-input", words[parseInt(query.match(/\d+/)[0]) - 1].replace(/[^a-zA-Z]+/g, "")), submit);
    },
    "odd-or-even": () => {
      const row = all(".row").find((each) => !each.querySelector(".selected"));
      if (!row) return submit();
      const odd = parseInt(text(row.querySelector(".display-number"))) % 2 !== 0;
      return click(row.querySelector(odd ? ".odd" : ".even"));
    },
  };
  return experts[task]();
}
