"""The pretrained SmolLM2-135M learns to add and subtract, by RL alone.

Asynchronous AIPO (Wu et al. 2025, section 6) on sums and differences of one-
and two-digit numbers; the answer is the first number of six new tokens.

Command: make train
Hardware: two CPU cores.
Duration: 6 to 7 minutes.
Expected: greedy accuracy on 256 held-out problems from 0.30 to 0.57 (seeds 0
and 1) or 0.60 (seed 2).
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  c = base.get_config()
  c.name = 'smollm2_arithmetic'
  c.num_steps = 44
  c.model.source = 'gguf'
  c.model.path = 'smollm2'
  # One- and two-digit operands equally often: the model knows some of the
  # former (greedy accuracy 0.44) and few of the latter (0.06).
  c.problems.uniform_digits = True
  # Answers below 0 are beyond the base model: of 40 none was right, greedily,
  # also after training. There is little to reinforce.
  c.problems.non_negative = True
  # As many of one digit as of two among the held-out problems, too.
  c.problems.held_out_fraction = 0.5
  c.prompt.chat = True
  c.prompt.prefill = '{question} ='
  c.generator.max_prompt_length = 24
  c.generator.max_new_tokens = 6
  c.generator.segment_length = 3
  # 23 tokens of the longest prompt and 8 times 6 of completions, at most.
  c.trainer.length_multiple = 72
  # Six tokens are enough for the answer; what follows is cut.
  c.report.expect_truncation = True
  return c
