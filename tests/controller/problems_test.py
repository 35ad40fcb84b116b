"""Requests of training and of evaluation, from one config."""

from absl.testing import absltest

from llamarl_jax.controller import problems
from tests.oracles import tiny


class TaskTest(absltest.TestCase):
  def test_what_truncates_belongs_to_evaluation(self):
    config = tiny.get_config(
      evaluation__top_k=3,
      evaluation__top_p=0.5,
      evaluation__min_p=0.25,
      evaluation__min_new_tokens=2,
      generator__stop_strings=('=', '+'),
      generator__temperature=0.5,
    )
    task = problems.make_task(config, problems.load_model(config))
    (held_out,) = task.evaluation_requests(1, num_samples=2, temperature=1.0)
    self.assertEqual(
      (held_out.top_k, held_out.top_p, held_out.min_p), (3, 0.5, 0.25)
    )
    self.assertEqual(held_out.min_new_tokens, 2)
    train = task.training_request(0)
    self.assertEqual((train.top_k, train.top_p, train.min_p), (0, 1.0, 0.0))
    self.assertEqual((train.min_new_tokens, train.temperature), (0, 0.5))
    for request in (held_out, train):
      self.assertEqual(request.stop_strings, ('=', '+'))


if __name__ == '__main__':
  absltest.main()
