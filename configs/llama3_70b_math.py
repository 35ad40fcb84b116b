r"""Llama 3.1 70B Instruct learns competition mathematics, MATH.

As configs/llama3_8b_math.py, on meshes of several machines: weights are sharded
over 'tensor' inside a machine and over 'fsdp' between them.

Command: make train CONFIG=configs/llama3_70b_math.py \
    ARGS="--config.model.path=DIR --config.problems.path=TRAIN.jsonl \
    --config.problems.held_out_path=TEST.jsonl \
    --config.launcher.address=auto"
Hardware: 128 GPUs of 80 GB: 64 train, 4 replicas of 16 generate. An executor is
one process so far, which sees the devices of one machine: until an executor may
be several processes this config can be planned, sized and compiled, not run.
Duration and result: not measured.

Where the numbers are from: as in configs/llama3_8b_math.py.
"""

import ml_collections

from configs import llama3_8b_math


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  c = llama3_8b_math.get_config()
  c.name = 'llama3_70b_math'
  c.model.architecture = 'llama-3.1-70b'
  c.batch_size = 128
  c.reward.num_workers = 16
  c.generator.num_replicas = 4
  c.generator.num_devices = 16
  # Two float32 copies, in use and arriving, take 35 GB of each device. The 8
  # key/value heads do not divide over 16: the cache is shared by slots.
  c.generator.tensor = 16
  c.trainer.num_devices = 64
  c.trainer.fsdp = 8
  c.trainer.tensor = 8
  c.trainer.micro_batch_size = 32
  return c
