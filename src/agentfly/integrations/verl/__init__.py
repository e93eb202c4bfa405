"""Training on verl and Ray: `agentfly train RECIPE --on verl nodes=N gpus=G`.

verl supplies sharded training, serving and weight sync; chains, tools, environments, rewards, failure policy,
advantages, loss, metrics and run directory are the same code as in a local run.

    launch             driver             checks the cluster, starts and supervises the job, shows its progress
    trainer            one actor          verl's V1 trainer with our advantages, metrics and checkpoints
    recorder           in the trainer     writes the run directory
    manager            in the trainer     sends groups to chain workers, and those of a dead worker to another one
                       N actors           the workers: run the chains of a group, put their rows into verl's queue
    backend            in the workers     verl's load-balanced servers as a `Backend`
    training_workers   verl's processes   our loss and learning-rate schedule
    engine             one per replica    the embedded engine as rollout server
    cpu                                   CPUs as a platform of verl: tests, laptops

`config`, `rows` and `recorder` need neither verl nor Ray.
"""
