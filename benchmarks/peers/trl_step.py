"""Worker: the same step with trl, the loss and forward pass of its GRPOTrainer.

With no older log-probs its ratio is 1 and its gradient that of the policy
gradient; loss type 'bnpo' divides by the number of completion tokens. Batches
are handed over ready-made: nothing is generated.
"""

import tempfile

import datasets
import tokenizers
import torch
import transformers
import trl

from benchmarks import workload as workload_lib
from benchmarks.peers import transformers_step
from benchmarks.peers import turns


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Returns a tokenizer that the trainer wants to have but does not use."""
  words = tokenizers.models.WordLevel({'<pad>': 0, 'a': 1}, unk_token='<pad>')
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(words),
    pad_token='<pad>',
    eos_token='<pad>',
    padding_side='left',
  )


def make_trainer(
  workload: workload_lib.Workload, folder: str
) -> trl.GRPOTrainer:
  """Returns trl's trainer of the workload's model, float32 throughout."""
  config = trl.GRPOConfig(
    output_dir=folder,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=workload.rows,
    gradient_accumulation_steps=1,
    num_generations=workload.rows,
    max_completion_length=workload.completion,
    loss_type='bnpo',
    beta=0.0,
    learning_rate=workload_lib.LEARNING_RATE,
    lr_scheduler_type='constant',
    adam_beta1=workload_lib.B1,
    adam_beta2=workload_lib.B2,
    adam_epsilon=workload_lib.EPSILON,
    weight_decay=workload_lib.WEIGHT_DECAY,
    max_grad_norm=workload_lib.CLIP_NORM,
    report_to='none',
  )
  return trl.GRPOTrainer(
    model=transformers_step.load_model(workload),
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    args=config,
    train_dataset=datasets.Dataset.from_list([{'prompt': 'a'}]),
    processing_class=_tokenizer(),
  )


def make_step(workload: workload_lib.Workload) -> turns.StepFn:
  """Returns the step."""
  with tempfile.TemporaryDirectory() as folder:
    trainer = make_trainer(workload, folder)
  trainer.current_gradient_accumulation_steps = 1
  optimizer = trainer.create_optimizer()
  model = trainer.model.train()
  tokens, advantages = transformers_step.load_batch(workload)
  ones = torch.ones_like(tokens)
  prompt = workload.prompt
  inputs = {
    'prompt_ids': tokens[:, :prompt],
    'prompt_mask': ones[:, :prompt],
    'completion_ids': tokens[:, prompt:],
    'completion_mask': ones[:, prompt:],
    'advantages': advantages,
  }

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = trainer.compute_loss(model, inputs)
    trainer.accelerator.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(
      model.parameters(), workload_lib.CLIP_NORM
    )
    optimizer.step()
    return float(norm)

  return step


if __name__ == '__main__':
  turns.serve(make_step, ('torch', 'transformers', 'trl'))
