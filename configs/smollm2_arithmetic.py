"""The pretrained SmolLM2-135M learns to add and subtract, by RL alone.

Asynchronous AIPO (Wu et al. 2025, section 6) on sums and differences of one-
and two-digit numbers; the answer is the first number of six new tokens.

Command: make train
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  c = base.get_config()
  c.name = 'smollm2_arithmetic'
  c.num_steps = 24
  c.model.source = 'gguf'
  c.model.path = 'smollm2'
  c.prompt.chat = True
  c.prompt.prefill = '{question} ='
  c.generator.max_prompt_length = 32
  c.generator.max_new_tokens = 6
  c.generator.segment_length = 3
  c.trainer.length_multiple = 4
  # Six tokens are enough for the answer; what follows is cut.
  c.report.expect_truncation = True
  return c
