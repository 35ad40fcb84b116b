"""Worker: the same step with transformers and torch, eager.

As a practiced user writes it: logits of completion tokens alone, log-probs
by `cross_entropy`, which never holds them for the whole vocabulary.
"""

import torch
import transformers

from benchmarks import workload as workload_lib
from benchmarks.peers import turns


def load_model(
  workload: workload_lib.Workload,
) -> transformers.LlamaForCausalLM:
  """Returns the model with the workload's weights, float32."""
  config = transformers.LlamaConfig(
    vocab_size=workload.vocab_size,
    hidden_size=workload.width,
    intermediate_size=workload.mlp_width,
    num_hidden_layers=workload.num_layers,
    num_attention_heads=workload.num_heads,
    num_key_value_heads=workload.num_kv_heads,
    head_dim=workload.head_dim,
    rms_norm_eps=workload.norm_epsilon,
    rope_parameters={
      'rope_type': 'default',
      'rope_theta': workload.rope_theta,
    },
    tie_word_embeddings=True,
    use_cache=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
  )
  model = transformers.LlamaForCausalLM(config)
  values = {
    name: torch.from_numpy(value)
    for name, value in workload_lib.weights(workload)
  }
  values['lm_head.weight'] = values['model.embed_tokens.weight']
  model.load_state_dict(values)
  return model.train()


def load_batch(
  workload: workload_lib.Workload,
) -> tuple[torch.Tensor, torch.Tensor]:
  """Returns tokens i64[R, T] and advantages f32[R]."""
  tokens, advantages = workload_lib.batch(workload)
  return torch.from_numpy(tokens).long(), torch.from_numpy(advantages)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
  """Returns AdamW as the workloads state it; norms do not decay."""
  parameters = list(model.parameters())
  groups = [
    {
      'params': [p for p in parameters if p.ndim > 1],
      'weight_decay': workload_lib.WEIGHT_DECAY,
    },
    {'params': [p for p in parameters if p.ndim == 1], 'weight_decay': 0.0},
  ]
  return torch.optim.AdamW(
    groups,
    lr=workload_lib.LEARNING_RATE,
    betas=(workload_lib.B1, workload_lib.B2),
    eps=workload_lib.EPSILON,
    fused=True,
  )


def make_step(workload: workload_lib.Workload) -> turns.StepFn:
  """Returns the step."""
  model = load_model(workload)
  optimizer = make_optimizer(model)
  tokens, advantages = load_batch(workload)
  # Token t is predicted at t - 1.
  places = torch.arange(workload.prompt - 1, workload.length - 1)
  targets = tokens[:, workload.prompt :]

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    logits = model(tokens, logits_to_keep=places).logits
    log_probs = -torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), targets.flatten(), reduction='none'
    ).view_as(targets)
    loss = -(advantages[:, None] * log_probs).sum() / targets.numel()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
      model.parameters(), workload_lib.CLIP_NORM
    )
    optimizer.step()
    return float(norm)

  return step


if __name__ == '__main__':
  turns.serve(make_step, ('torch', 'transformers'))
