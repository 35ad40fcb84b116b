"""The train steps that are measured: shapes, weights, batch, arithmetic.

Only the standard library and numpy are imported: the peers, each in an
environment of its own, take the very same weights and tokens from here. Names
and layouts of weights are those of Hugging Face checkpoints, [out, in].
"""

from collections.abc import Iterator
import dataclasses
import zlib

import numpy as np

LEARNING_RATE = 1e-5
B1 = 0.9
B2 = 0.95
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Workload:
  """A Llama with tied embeddings, and the batch of one step.

  Attributes:
    vocab_size: V.
    width: D.
    num_layers: L.
    num_heads: H.
    num_kv_heads: K.
    head_dim: A.
    mlp_width: of the gated hidden layer (F).
    rope_theta: base of the rotary wavelengths.
    norm_epsilon: of RMSNorm.
    rows: sequences of a step.
    prompt: tokens of each that are read only.
    completion: tokens of each that are trained on.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  norm_epsilon: float
  rows: int
  prompt: int
  completion: int

  @property
  def length(self) -> int:
    """Tokens a row."""
    return self.prompt + self.completion

  @property
  def num_tokens(self) -> int:
    """Tokens a step."""
    return self.rows * self.length


WORKLOADS = {
  # 3.16 M parameters: what surrounds matrix products counts as much as they.
  '3m': Workload(
    vocab_size=512,
    width=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    mlp_width=688,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    rows=32,
    prompt=32,
    completion=128,
  ),
  'smollm2-135m': Workload(
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    rope_theta=100000.0,
    norm_epsilon=1e-5,
    rows=4,
    prompt=64,
    completion=192,
  ),
  # For trying the benchmarks out.
  'tiny': Workload(
    vocab_size=64,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=64,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    rows=4,
    prompt=4,
    completion=8,
  ),
}


def weight_shapes(workload: Workload) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each weight by its name."""
  w = workload
  query, key = w.num_heads * w.head_dim, w.num_kv_heads * w.head_dim
  shapes: dict[str, tuple[int, ...]] = {
    'model.embed_tokens.weight': (w.vocab_size, w.width),
    'model.norm.weight': (w.width,),
  }
  for i in range(w.num_layers):
    layer = f'model.layers.{i}'
    shapes |= {
      f'{layer}.input_layernorm.weight': (w.width,),
      f'{layer}.self_attn.q_proj.weight': (query, w.width),
      f'{layer}.self_attn.k_proj.weight': (key, w.width),
      f'{layer}.self_attn.v_proj.weight': (key, w.width),
      f'{layer}.self_attn.o_proj.weight': (w.width, query),
      f'{layer}.post_attention_layernorm.weight': (w.width,),
      f'{layer}.mlp.gate_proj.weight': (w.mlp_width, w.width),
      f'{layer}.mlp.up_proj.weight': (w.mlp_width, w.width),
      f'{layer}.mlp.down_proj.weight': (w.width, w.mlp_width),
    }
  return shapes


def num_parameters(workload: Workload) -> int:
  """Returns the number of parameters, the tied embedding counted once."""
  return sum(int(np.prod(s)) for s in weight_shapes(workload).values())


def weights(workload: Workload) -> Iterator[tuple[str, np.ndarray]]:
  """Yields name and value of each weight, float32: norms 1, others random."""
  for name, shape in weight_shapes(workload).items():
    if len(shape) == 1:
      yield name, np.ones(shape, np.float32)
      continue
    # Seeded by name: a peer may ask for them in any order.
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    yield name, rng.standard_normal(shape, np.float32) * shape[1] ** -0.5


def batch(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens i32[R, T] and the advantage of each row, f32[R].

  The loss is - sum_t advantage log pi(token_t) over completion tokens, divided
  by their number. No token is 0, which some peers take for padding.
  """
  rng = np.random.default_rng(0)
  shape = (workload.rows, workload.length)
  tokens = rng.integers(1, workload.vocab_size, shape, dtype=np.int32)
  advantages = rng.standard_normal(workload.rows, np.float32)
  return tokens, advantages


def forward_flops(workload: Workload) -> float:
  """Returns the arithmetic of matrix products that one forward pass needs.

  Multiplication and addition count apart. Only what the loss depends on is
  counted: attention reads what precedes a token, and logits are of completion
  tokens. A gradient needs twice as much again.
  """
  w = workload
  heads = 2 * w.width * w.head_dim * (w.num_heads + w.num_kv_heads)
  per_token = w.num_layers * 2 * (heads + 3 * w.width * w.mlp_width)
  pairs = w.rows * w.length * (w.length + 1) // 2
  attention = w.num_layers * 4 * w.num_heads * w.head_dim * pairs
  logits = 2 * w.width * w.vocab_size * w.rows * w.completion
  return float(w.num_tokens * per_token + attention + logits)
