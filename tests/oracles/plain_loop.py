"""The synchronous algorithm as one plain loop over the pure functions.

No executors, channels, queues or publications: what the controller must equal,
bit for bit, at max_staleness = 0.
"""

import jax

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.executors import generator
from llamarl_jax.models import llama
from llamarl_jax.sampling import engine as engine_lib
from llamarl_jax.sharding import digest
from llamarl_jax.training import batching
from llamarl_jax.training import facts
from llamarl_jax.training import optimizer as optimizer_lib
from llamarl_jax.training import state as state_lib
from llamarl_jax.training import step as step_lib


def run(
  trainer_settings, generator_settings, task, reward_fn, batch_size, steps
):
  """Returns the digest of the parameters after each step."""
  s, g, model = trainer_settings, generator_settings, generator_settings.model
  optimizer = optimizer_lib.make_optimizer(**s.optimizer)
  params = jax.jit(lambda k: llama.init_params(model, k))(
    jax.random.key(s.source.seed)
  )
  state = state_lib.init_train_state(params, optimizer)
  train_step = step_lib.make_train_step(
    model,
    registry.make_loss(**s.loss),
    optimizer,
    temperature=s.temperature,
    max_completion=s.max_new_tokens
    * (s.group_size if s.layout.share_prompts else 1),
  )
  advantage_fn = jax.jit(registry.make_advantage(**s.advantage))
  engine = engine_lib.Engine(
    model,
    generator.engine_settings(g),
    key=jax.random.key(g.seed),
    stop_tokens=g.tokenizer.stop_ids,
    decode_text=g.tokenizer.decode,
  )
  digests = []
  for v in range(steps):
    requests = [
      task.training_request(i)
      for i in range(v * batch_size, (v + 1) * batch_size)
    ]
    engine.submit(requests)
    done = []
    while engine.num_running or engine.num_waiting:
      done += engine.segment(state.params, v).finished
    groups = [_group(r, done, reward_fn) for r in requests]
    advantages = jax.device_get(advantage_fn(*facts.group_rewards(groups)))
    batch = batching.build_trajectories(
      groups,
      advantages,
      row_length=batching.row_length(
        groups,
        s.layout.length_multiple,
        share_prompts=s.layout.share_prompts,
      ),
      pad_token=s.pad_token,
      share_prompts=s.layout.share_prompts,
    )
    state, _ = train_step(state, jax.device_put(batch))
    digests.append(digest.params_digest(state.params))
  return digests


def _group(request, done, reward_fn):
  """Returns the scored group of one request."""
  completions = sorted(
    (one.completion for one in done if one.request is request),
    key=lambda completion: completion.sample_index,
  )
  rewards = tuple(
    reward_fn(request.problem, c.text, c.finish_reason) for c in completions
  )
  return types.Group(request, tuple(completions), rewards)
