r"""Llama 3.2 1B Instruct learns grade-school mathematics, GSM8K.

Asynchronous AIPO (Wu et al. 2025, section 6): the trainer updates while four
generator replicas, one version behind, sample the next batch.

Command: make train CONFIG=configs/llama3_1b_gsm8k.py \
    ARGS="--config.model.path=DIR --config.problems.path=TRAIN.jsonl \
    --config.problems.held_out_path=TEST.jsonl"
DIR is a Hugging Face folder of the model; the files are GSM8K's own, one object
with 'question' and 'answer' a line.
Hardware: 8 GPUs of 80 GB in one machine: 4 train, 4 generate.
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
  c.name = 'llama3_1b_gsm8k'
  c.num_steps = 200
  c.batch_size = 64
  c.group_size = 8
  c.model.source = 'hf'
  c.model.architecture = 'llama-3.2-1b'
  c.problems.source = 'jsonl'
  c.problems.path = 'data/gsm8k/train.jsonl'
  c.problems.held_out_path = 'data/gsm8k/test.jsonl'
  # The solution ends in '#### 1,234'.
  c.problems.answer_pattern = r'####\s*(.+)'
  c.prompt.chat = True
  c.prompt.user = (
    '{question}\n\nReason step by step, and put the final answer in'
    ' \\boxed{{}}.'
  )
  c.reward.scorer = 'math'
  c.reward.num_workers = 8
  c.reward.timeout_seconds = 5.0
  c.generator.num_replicas = 4
  c.generator.num_slots = 128
  c.generator.segment_length = 64
  c.generator.max_prompt_length = 512
  c.generator.max_new_tokens = 512
  c.algorithm.max_importance_ratio = 4.0
  c.trainer.learning_rate = 1e-6
  c.trainer.warmup_steps = 10
  c.trainer.num_devices = 4
  c.trainer.fsdp = 4
  c.trainer.compute_dtype = 'bfloat16'
  c.trainer.remat = 'full'
  # Completions differ in length by more than a row shared by a group can use.
  c.trainer.share_prompts = False
  c.trainer.pack_tokens = 1024
  c.trainer.micro_batch_size = 64
  c.trainer.length_multiple = 128
  c.trainer.checkpoint_every = 50
  c.evaluation.num_problems = 512
  c.launcher.platform = 'gpu'
  return c
