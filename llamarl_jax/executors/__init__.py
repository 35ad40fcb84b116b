"""The paper's executors: generator, reward, reference, trainer."""
