"""The synchronous algorithm as one plain loop over the pure functions.

No executors, channels, queues or publications: what the controller must equal,
bit for bit, at max_staleness = 0.
"""

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.models import llama
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import segments
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
  sizes = {'max_prompt': g.max_prompt_length, 'max_new': g.max_new_tokens}
  slots = decoding.init_state(model, g.num_slots, *sizes.values())
  digests = []
  for v in range(steps):
    requests = [
      task.training_request(i)
      for i in range(v * batch_size, (v + 1) * batch_size)
    ]
    places = [(r, k) for r in requests for k in range(r.num_samples)]
    filling = segments.pack(
      [segments.Assignment(r, k, slot) for slot, (r, k) in enumerate(places)],
      num_slots=g.num_slots,
      **sizes,
    )
    slots = decoding.insert(model, state.params, slots, filling)
    while np.any(slots.active):
      slots = decoding.decode_segment(
        model,
        state.params,
        slots,
        jax.random.key(g.seed),
        jnp.int32(v),
        num_steps=g.segment_length,
        stop_tokens=g.tokenizer.stop_ids,
      )
    done = segments.harvest(slots, range(len(places)))
    groups = [_group(r, done, g.tokenizer, reward_fn) for r in requests]
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


def _group(request, done, tokenizer, reward_fn):
  """Returns the scored group of one request."""
  completions = tuple(
    types.Completion(
      admission_index=d.admission_index,
      sample_index=d.sample_index,
      tokens=d.tokens,
      log_probs=d.log_probs,
      versions=d.versions,
      finish_reason=d.finish_reason,
      text=tokenizer.decode(d.tokens.tolist()),
    )
    for d in done
    if d.admission_index == request.admission_index
  )
  rewards = tuple(
    reward_fn(request.problem, c.text, c.finish_reason) for c in completions
  )
  return types.Group(request, completions, rewards)
