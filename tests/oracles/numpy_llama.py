"""A Llama forward pass in plain numpy, on weights named and laid out as GGUF.

Independent of the library: no jax, one head at a time, rotary embedding on
neighboring channels as the file has them, float64 throughout.
"""

import gguf
from gguf import quants
import numpy as np


def read_weights(path):
  """Returns the dequantized tensors and metadata, by the package's reader."""
  reader = gguf.GGUFReader(path)
  weights = {
    tensor.name: quants.dequantize(tensor.data, tensor.tensor_type)
    for tensor in reader.tensors
  }
  return weights, reader.fields


def _norm(x, scale, epsilon):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def _rotate_neighbors(x, theta):
  """Rotates channels (2i, 2i + 1) of x[T, A] by t * theta ** (-2i / A)."""
  length, size = x.shape
  out = np.empty_like(x)
  for i in range(size // 2):
    angle = np.arange(length) * theta ** (-2 * i / size)
    even, odd = x[:, 2 * i], x[:, 2 * i + 1]
    out[:, 2 * i] = even * np.cos(angle) - odd * np.sin(angle)
    out[:, 2 * i + 1] = even * np.sin(angle) + odd * np.cos(angle)
  return out


def _attention(x, layer, heads, kv_heads, theta):
  length = x.shape[0]
  queries, keys, values = (
    x @ layer[name].astype(np.float64).T
    for name in ('attn_q', 'attn_k', 'attn_v')
  )
  size = queries.shape[1] // heads
  future = np.triu(np.ones((length, length), bool), 1)
  mixed = []
  for head in range(heads):
    shared = head // (heads // kv_heads)
    own = slice(head * size, (head + 1) * size)
    other = slice(shared * size, (shared + 1) * size)
    q = _rotate_neighbors(queries[:, own], theta)
    k = _rotate_neighbors(keys[:, other], theta)
    scores = q @ k.T / np.sqrt(size)
    scores[future] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mixed.append(weights @ values[:, other])
  return np.concatenate(mixed, axis=1) @ layer['attn_output'].T


def forward(weights, tokens, *, layers, heads, kv_heads, theta, epsilon):
  """Returns the logits, f64[T, V].

  Args:
    weights: by GGUF name, matrices [out, in].
    tokens: ids, one sequence.
    layers: number of layers.
    heads: number of query heads.
    kv_heads: number of key/value heads.
    theta: rotary base.
    epsilon: of the norms.
  """
  embedding = weights['token_embd.weight']
  x = embedding[np.asarray(tokens)].astype(np.float64)
  for i in range(layers):
    prefix = f'blk.{i}.'
    layer = {
      name.removeprefix(prefix).removesuffix('.weight'): value
      for name, value in weights.items()
      if name.startswith(prefix)
    }
    normed = _norm(x, layer['attn_norm'], epsilon)
    x = x + _attention(normed, layer, heads, kv_heads, theta)
    normed = _norm(x, layer['ffn_norm'], epsilon)
    gate = normed @ layer['ffn_gate'].T
    gated = gate / (1 + np.exp(-gate)) * (normed @ layer['ffn_up'].T)
    x = x + gated @ layer['ffn_down'].T
  x = _norm(x, weights['output_norm.weight'], epsilon)
  return x @ weights.get('output.weight', embedding).T


def log_probs(logits, tokens):
  """Returns the log-prob of each token after the first, f64[T - 1]."""
  top = logits.max(axis=1, keepdims=True)
  normalizer = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
  steps = np.arange(len(tokens) - 1)
  return logits[steps, tokens[1:]] - normalizer[:-1]
