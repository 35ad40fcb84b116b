r"""Llama 3.1 405B Instruct learns competition mathematics, MATH.

As configs/llama3_70b_math.py, on 1024 GPUs.

Command: make train CONFIG=configs/llama3_405b_math.py \
    ARGS="--config.model.path=DIR --config.problems.path=TRAIN.jsonl \
    --config.problems.held_out_path=TEST.jsonl \
    --config.launcher.address=auto"
Hardware: 1024 GPUs of 80 GB: 512 train, 8 replicas of 64 generate. An executor
is one process so far, which sees the devices of one machine: until an executor
may be several processes this config can be planned, sized and compiled, not
run.
Duration and result: not measured.

Where the numbers are from: as in configs/llama3_8b_math.py. The paper's
abstract gives a speed-up of 10.7 over its baseline for a 405B model; the
set-up it was measured in is not known to us, and this is not it.
"""

import ml_collections

from configs import llama3_8b_math


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  c = llama3_8b_math.get_config()
  c.name = 'llama3_405b_math'
  c.model.architecture = 'llama-3.1-405b'
  c.batch_size = 256
  c.reward.num_workers = 32
  c.generator.num_replicas = 8
  c.generator.num_devices = 64
  # Two float32 copies, in use and arriving, take 51 GB of each device.
  c.generator.tensor = 64
  c.trainer.num_devices = 512
  c.trainer.fsdp = 64
  c.trainer.tensor = 8
  c.trainer.micro_batch_size = 64
  c.trainer.pack_rows = 64
  # Its 3.2 TB rest in the memory of the hosts, which leaves room on the
  # devices for longer rows.
  c.trainer.offload_optimizer = True
  return c
