"""Worker: the same step with tunix, its Llama and its log-probs.

The step is put together as its trainer does it: `nnx.value_and_grad`, then
`nnx.Optimizer`, both under `nnx.jit` with the graph cached.
"""

from collections.abc import Iterator
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.models.llama3 import model as model_lib
from tunix.rl import common

from benchmarks import workload as workload_lib
from benchmarks.peers import turns

# No token of a workload is 0 or beyond the vocabulary.
_PAD = 0
_END = -1


def _places(model: model_lib.Llama3) -> Iterator[tuple[str, nnx.Param]]:
  """Yields the name of each weight and where the model keeps it."""
  yield 'model.embed_tokens.weight', model.embedder.input_embedding
  yield 'model.norm.weight', model.final_norm.w
  for i, layer in enumerate(model.layers):
    name = f'model.layers.{i}'
    yield f'{name}.input_layernorm.weight', layer.input_layernorm.w
    yield (
      f'{name}.post_attention_layernorm.weight',
      layer.post_attention_layernorm.w,
    )
    for part in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
      yield f'{name}.self_attn.{part}.weight', getattr(layer.attn, part).w
    for part in ('gate_proj', 'up_proj', 'down_proj'):
      yield f'{name}.mlp.{part}.weight', getattr(layer.mlp, part).kernel


def load_model(workload: workload_lib.Workload) -> model_lib.Llama3:
  """Returns tunix's Llama with the workload's weights, float32."""
  config = model_lib.ModelConfig(
    num_layers=workload.num_layers,
    vocab_size=workload.vocab_size,
    embed_dim=workload.width,
    hidden_dim=workload.mlp_width,
    num_heads=workload.num_heads,
    head_dim=workload.head_dim,
    num_kv_heads=workload.num_kv_heads,
    rope_theta=int(workload.rope_theta),
    norm_eps=workload.norm_epsilon,
    weight_tying=True,
  )
  model = model_lib.Llama3(config, rngs=nnx.Rngs(params=0))
  places = dict(_places(model))
  for name, value in workload_lib.weights(workload):
    place = places.pop(name)
    # Projections are [in, out] here, some with heads apart.
    if value.ndim > 1 and name != 'model.embed_tokens.weight':
      value = value.T
    value = np.ascontiguousarray(value).reshape(place.value.shape)
    place.value = jnp.asarray(value)
  if places:
    raise ValueError(f'no value for {sorted(places)}')
  return model


def make_step(workload: workload_lib.Workload) -> turns.StepFn:
  """Returns the step; it is compiled when first called."""
  # Axis names are metadata: there is one device.
  nnx.use_eager_sharding(False)
  # 0.1.7 rotates by the default of this function, whatever its config says.
  model_lib.apply_rope = functools.partial(
    model_lib.apply_rope, rope_theta=workload.rope_theta
  )
  model = load_model(workload)
  optimizer = nnx.Optimizer(
    model,
    optax.chain(
      optax.clip_by_global_norm(workload_lib.CLIP_NORM),
      optax.adamw(
        workload_lib.LEARNING_RATE,
        b1=workload_lib.B1,
        b2=workload_lib.B2,
        eps=workload_lib.EPSILON,
        weight_decay=workload_lib.WEIGHT_DECAY,
        mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
      ),
    ),
    wrt=nnx.Param,
  )
  tokens, advantages = map(jnp.asarray, workload_lib.batch(workload))
  prompts = tokens[:, : workload.prompt]
  completions = tokens[:, workload.prompt :]

  def loss(
    model: model_lib.Llama3,
    prompts: jax.Array,
    completions: jax.Array,
    advantages: jax.Array,
  ) -> jax.Array:
    graphdef, state = nnx.split(model)
    log_probs = common.compute_per_token_logps(
      graphdef,
      state,
      prompt_tokens=prompts,
      completion_tokens=completions,
      pad_id=_PAD,
      eos_id=_END,
      stop_gradient=False,
    )
    return -jnp.sum(advantages[:, None] * log_probs) / completions.size

  def train_step(
    model: model_lib.Llama3, optimizer: nnx.Optimizer, *batch: jax.Array
  ) -> jax.Array:
    gradients = nnx.grad(loss)(model, *batch)
    norm = optax.global_norm(gradients)
    optimizer.update(model, gradients)
    return norm

  compiled = nnx.cached_partial(
    nnx.jit(train_step, donate_argnames=('optimizer',)), model, optimizer
  )

  def step() -> float:
    norm = compiled(prompts, completions, advantages)
    jax.block_until_ready(nnx.state(model))
    return float(norm)

  return step


if __name__ == '__main__':
  turns.serve(make_step, ('google-tunix', 'jax', 'flax'))
