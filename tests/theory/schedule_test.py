import dataclasses
import itertools

from absl.testing import parameterized

from llamarl_jax.models import catalog
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices
from llamarl_jax.theory import jobs
from llamarl_jax.theory import lengths
from llamarl_jax.theory import memory
from llamarl_jax.theory import schedule

H100 = devices.find('h100')
JOB = jobs.Job(
  config=catalog.find('llama-3.1-8b'),
  device=H100,
  num_devices=32,
  batch_size=256,
  prompt_tokens=256.0,
  lengths=lengths.Lengths(512, 0.5, 1024),
)


class StepSecondsTest(parameterized.TestCase):
  @parameterized.parameters(
    (3.0, 5.0, 1.0, 0, 9.0),  # Synchronous: the sum.
    (3.0, 5.0, 1.0, 1, 5.0),  # The slower side.
    (5.0, 3.0, 1.0, 3, 5.0),
    (3.0, 5.0, 6.0, 1, 7.0),  # Two batches cannot cover 14 s by 5 s each.
    (3.0, 5.0, 6.0, 2, 5.0),
  )
  def test_by_hand(self, train, generate, delays, staleness, expected):
    self.assertEqual(
      schedule.step_seconds(train, generate, delays, max_staleness=staleness),
      expected,
    )


class ScheduleTest(parameterized.TestCase):
  def test_plans_fit_their_devices(self):
    room = memory.usable_bytes(H100)
    sync = schedule.best_synchronous(JOB)
    parts = memory.total(sync.trainer_parts)
    parts += memory.total(sync.generator_parts)
    # One constraint shared by both, and one for each.
    self.assertLessEqual(parts, room)
    plan = schedule.best_asynchronous(JOB)
    self.assertLessEqual(memory.total(plan.trainer_parts), room)
    self.assertLessEqual(memory.total(plan.generator_parts), room)
    used = plan.trainer.num_devices + plan.generator.num_devices
    self.assertLessEqual(used, 32)
    self.assertEqual(sync.trainer.num_devices, 32)
    self.assertEqual(sync.trainer.replica_devices, sync.generator.tensor)

  def test_bubbles_are_what_the_other_side_takes(self):
    sync = schedule.best_synchronous(JOB)
    self.assertAlmostEqual(
      sync.trainer_bubble,
      (sync.generate_seconds + sync.publish_seconds) / sync.step_seconds,
    )
    plan = schedule.best_asynchronous(JOB)
    self.assertAlmostEqual(
      min(plan.trainer_bubble, plan.generator_bubble), 0.0, places=6
    )

  @parameterized.parameters(*catalog.ARCHITECTURES)
  def test_asynchronous_is_faster(self, name):
    job = dataclasses.replace(
      JOB, config=catalog.find(name), num_devices=256, batch_size=1024
    )
    slow = schedule.best_synchronous(job).step_seconds
    fast = schedule.best_asynchronous(job).step_seconds
    self.assertLess(fast, slow)

  def test_no_layout_of_a_grid_is_faster(self):
    """Every trainer of whole devices, every micro-batch, every slot count."""
    job = dataclasses.replace(JOB, num_devices=16, batch_size=64)
    design = dataclasses.replace(jobs.ASYNCHRONOUS, quantized=False)
    found = schedule.best(job, design)
    room = memory.usable_bytes(H100)
    train = []
    for tensor, fsdp, remat in itertools.product(
      (1, 2, 4, 8), (1, 2, 4, 8), ('none', 'dots', 'full')
    ):
      data = 8 // (tensor * fsdp)
      for share in range(1, 64 // fsdp + 1) if data else ():
        layout = cost_model.TrainLayout(tensor, fsdp, data, share * fsdp, remat)
        parts = memory.trainer(job.config, layout, tokens=job.sample_tokens)
        if memory.total(parts) <= room:
          cost = cost_model.train_step(
            job.config,
            H100,
            job.efficiency,
            layout,
            samples=64,
            tokens=job.sample_tokens,
            pairs=job.sample_pairs,
          )
          train.append(float(cost.seconds))
    # The only split of 16 devices in units of 8.
    self.assertEqual(found.trainer.num_devices, 8)
    self.assertAlmostEqual(found.train_seconds, min(train))

  def test_ingredients_only_help_where_they_only_add_choices(self):
    pools = jobs.Design(two_pools=True)
    own = dataclasses.replace(pools, own_parallelism=True)
    small = dataclasses.replace(own, quantized=True)
    both = dataclasses.replace(small, overlapped=True)
    partial = dataclasses.replace(both, refilled=True, partial_rollouts=True)
    times = [
      schedule.best(JOB, design).step_seconds
      for design in (pools, own, small, both, partial)
    ]
    self.assertEqual(times, sorted(times, reverse=True))

  def test_offloading_gives_each_side_all_memory(self):
    shared = schedule.best(JOB, jobs.Design(refilled=True))
    swapped = schedule.best(JOB, jobs.Design(refilled=True, offloaded=True))
    self.assertGreater(swapped.swap_seconds, 0)
    self.assertGreaterEqual(swapped.generator.slots, shared.generator.slots)

  def test_what_does_not_fit_is_explained(self):
    job = dataclasses.replace(
      JOB, config=catalog.find('llama-3.1-405b'), num_devices=8
    )
    with self.assertRaisesRegex(
      ValueError, r'(?s)the trainer alone on 8: .*GB too much.*generator alone'
    ):
      schedule.best_asynchronous(job)

  def test_contradictory_designs_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'two_pools=True'):
      jobs.Design(overlapped=True)
    with self.assertRaisesRegex(ValueError, 'shared devices'):
      jobs.Design(two_pools=True, offloaded=True)
