"""Training on verl and Ray: `agentfly train RECIPE --on verl nodes=N gpus=G`.

verl supplies sharded training, serving and weight sync; chains, tools, environments, rewards, failure policy,
advantages, loss, metrics and run directory are the same code as in a local run.

    launch      (driver)           checks the cluster, starts and supervises the job, shows its progress
    trainer     (one actor)        verl's V1 trainer with our advantages, metrics and checkpoints
    manager     (in the trainer)   sends groups to chain workers, and those of a dead worker to another one
                (N actors)         the workers: run all chains of a group, put their rows into verl's TransferQueue
    backend     (in the workers)   verl's load-balanced servers as a `Backend`
    recorder    (one actor)        owns the run directory
    engine, weights                the embedded engine as rollout server, and its weights on other machines
    cpu                            CPUs as a platform of verl: tests, laptops

`config` and `rows` need neither verl nor Ray.
"""
