import math

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.training import optimizer as optimizers


def _params():
  return {
    'kernel': jnp.array([[1.0, -2.0], [0.5, 4.0]]),
    'attention_norm': {'scale': jnp.array([1.0, 2.0])},
  }


def _grads():
  return {
    'kernel': jnp.array([[3.0, -0.1], [1e-3, 0.0]]),
    'attention_norm': {'scale': jnp.array([4.0, -2.0])},
  }


def _update(optimizer, params, grads):
  updates, state = optimizer.update(grads, optimizer.init(params), params)
  return updates, state


class OptimizerTest(parameterized.TestCase):
  def test_first_step_is_the_closed_form(self):
    """With bias correction m = g and v = g ** 2 at the first step.

    update = - rate * (g / (|g| + epsilon) + decay * p), no decay on norms.
    """
    rate, epsilon, decay = 0.1, 1e-2, 0.3
    optimizer = optimizers.make_optimizer(
      learning_rate=rate,
      epsilon=epsilon,
      weight_decay=decay,
      clip_norm=math.inf,
    )
    updates, _ = _update(optimizer, _params(), _grads())

    def expected(gradient, param, decay):
      unit = np.asarray(gradient) / (np.abs(gradient) + epsilon)
      return -rate * (unit + decay * np.asarray(param))

    kernel = expected(_grads()['kernel'], _params()['kernel'], decay)
    scale = expected(
      _grads()['attention_norm']['scale'],
      _params()['attention_norm']['scale'],
      0.0,
    )
    chex.assert_trees_all_close(
      updates,
      {'kernel': kernel, 'attention_norm': {'scale': scale}},
      rtol=1e-5,
    )

  def test_clips_by_the_norm_of_all_leaves(self):
    # Large epsilon makes Adam nearly linear in g, so that scale shows.
    kwargs = {'learning_rate': 1.0, 'epsilon': 1e6}
    leaves = [np.asarray(g) for g in jax.tree.leaves(_grads())]
    norm = np.sqrt(sum(np.sum(g**2) for g in leaves))
    free, _ = _update(
      optimizers.make_optimizer(clip_norm=math.inf, **kwargs),
      _params(),
      _grads(),
    )
    clipped, _ = _update(
      optimizers.make_optimizer(clip_norm=0.5, **kwargs), _params(), _grads()
    )
    expected = jax.tree.map(lambda u: u * 0.5 / norm, free)
    chex.assert_trees_all_close(clipped, expected, rtol=1e-4)

  def test_zero_rate_gives_zero_updates(self):
    optimizer = optimizers.make_optimizer(learning_rate=0.0, weight_decay=0.1)
    updates, _ = _update(optimizer, _params(), _grads())
    for leaf in jax.tree.leaves(updates):
      np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))

  @parameterized.parameters(
    ('constant', 0, [2.0, 2.0, 2.0, 2.0, 2.0]),
    ('constant', 4, [0.5, 1.0, 1.5, 2.0, 2.0]),
    # 2 * (1 + cos(pi n / 4)) / 2
    ('cosine', 0, [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]),
    ('cosine', 2, [1.0, 2.0, 2.0, 1.0, 0.0]),
  )
  def test_schedules(self, name, warmup_steps, expected):
    schedule = optimizers.learning_rate_schedule(
      name, learning_rate=2.0, warmup_steps=warmup_steps, num_steps=4
    )
    rates = [schedule(n) for n in range(5)]
    np.testing.assert_allclose(rates, expected, atol=1e-6)

  @parameterized.parameters(
    ({'b1': 1.0}, 'b1 must be .* got 1.0'),
    ({'b2': -0.1}, 'b2 must be'),
    ({'epsilon': 0.0}, 'epsilon must be above 0'),
    ({'clip_norm': -1.0}, 'clip_norm must be above 0, got -1.0'),
    ({'weight_decay': math.nan}, 'weight_decay must be .* got nan'),
    ({'learning_rate': -1.0}, 'learning_rate must be .* got -1.0'),
    ({'learning_rate': math.inf}, 'learning_rate must be'),
    ({'warmup_steps': -1}, 'warmup_steps must be'),
    ({'schedule': 'sine'}, "'sine': choose one of .*constant.*cosine"),
    ({'schedule': 'cosine', 'warmup_steps': 5, 'num_steps': 5}, 'num_steps'),
  )
  def test_bad_values_are_named(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      optimizers.make_optimizer(**({'learning_rate': 0.1} | changes))


if __name__ == '__main__':
  absltest.main()
