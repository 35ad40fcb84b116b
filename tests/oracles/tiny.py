"""A config of the main job that is small enough to run in seconds."""

from configs import arithmetic


def get_config(**changes):
  """Returns the arithmetic task on one digit, with a very small model.

  The digit answer is guessed right now and then even by a random policy, so
  that advantages are not all 0 and updates are real.

  Args:
    **changes: fields by dotted name, dots written as two underscores.
  """
  c = arithmetic.get_config()
  c.name = 'tiny'
  c.num_steps = 3
  c.batch_size = 4
  c.group_size = 8
  c.max_staleness = 0
  c.model.width = 32
  c.model.num_layers = 2
  c.model.num_heads = 4
  c.model.num_kv_heads = 2
  c.model.head_dim = 8
  c.model.mlp_width = 64
  c.problems.max_value = 9
  c.reward.scorer = 'first_number'
  c.generator.num_slots = 32
  c.generator.segment_length = 2
  c.generator.max_new_tokens = 4
  c.trainer.micro_batch_size = 32
  c.trainer.learning_rate = 1e-2
  c.trainer.checkpoint_every = 100
  c.supervised.num_steps = 0
  c.supervised.batch_size = 32
  c.evaluation.num_problems = 4
  c.launcher.name = 'local'
  c.report.write = False
  c.report.expect_truncation = True
  for name, value in changes.items():
    *folders, field = name.split('__')
    node = c
    for folder in folders:
      node = node[folder]
    assert field in node, name
    node[field] = value
  return c
