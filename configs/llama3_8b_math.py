r"""Llama 3.1 8B Instruct learns competition mathematics, MATH.

Asynchronous AIPO (Wu et al. 2025, section 6), the generators one version
behind. Not a set-up of the paper's, which are not known to us in full.

Command: make train CONFIG=configs/llama3_8b_math.py \
    ARGS="--config.model.path=DIR --config.problems.path=TRAIN.jsonl \
    --config.problems.held_out_path=TEST.jsonl \
    --config.launcher.address=auto"
DIR is a Hugging Face folder of the model that every machine can read; a line of
the files is an object with 'problem' and 'answer', the bare final answer.
Hardware: 16 GPUs of 80 GB, two machines of one Ray cluster: one trains, one
holds two generator replicas.
Duration and result: not measured.

Where the numbers are from: max_importance_ratio is inside [2, 10], the range
the paper says works well. Mesh, batch, lengths and learning rate are our
choice.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  c = base.get_config()
  c.name = 'llama3_8b_math'
  c.num_steps = 500
  c.batch_size = 64
  c.group_size = 8
  c.model.source = 'hf'
  c.model.architecture = 'llama-3.1-8b'
  c.problems.source = 'jsonl'
  c.problems.path = 'data/math/train.jsonl'
  c.problems.held_out_path = 'data/math/test.jsonl'
  c.problems.question_field = 'problem'
  c.prompt.chat = True
  c.prompt.user = (
    '{problem}\n\nReason step by step, and put the final answer in \\boxed{{}}.'
  )
  c.reward.scorer = 'math'
  c.reward.num_workers = 8
  c.reward.timeout_seconds = 5.0
  c.generator.num_replicas = 2
  c.generator.num_devices = 4
  c.generator.tensor = 4
  c.generator.num_slots = 256
  c.generator.segment_length = 64
  c.generator.max_prompt_length = 1024
  c.generator.max_new_tokens = 2048
  c.algorithm.max_importance_ratio = 4.0
  c.trainer.learning_rate = 1e-6
  c.trainer.warmup_steps = 10
  c.trainer.num_devices = 8
  c.trainer.fsdp = 8
  c.trainer.compute_dtype = 'bfloat16'
  c.trainer.remat = 'full'
  # Long completions: a row shared by a group would be 17,408 tokens.
  c.trainer.share_prompts = False
  c.trainer.pack_tokens = 4096
  c.trainer.micro_batch_size = 64
  c.trainer.length_multiple = 128
  c.trainer.checkpoint_every = 50
  c.evaluation.num_problems = 512
  c.launcher.platform = 'gpu'
  return c
