"""Baseline: MAML on sine waves in JAX; one process with one thread.

python experiments/benchmarks/jax_maml.py --model mlp --tasks 25 --shots 10 --queries 10

The whole outer step is one compiled function: sampling of the tasks, vmap over them, the gradient
through the inner steps, and Adam. The tasks have the same distribution as metadist's, but other
random numbers. With `--steps-per-call`, a call takes several outer steps by `jax.lax.scan`, and
`--iterations` counts the calls.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

from typing import Any

import jax
import jax.numpy as jnp
from problem import OUTER_LR, inner_lr, measure, network, parse_arguments

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def predict(parameters: list, x: jax.Array) -> jax.Array:
    """The MLP: alternating weights and biases."""
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = jax.nn.relu(x @ weight + bias)
    return x @ parameters[-2] + parameters[-1]


def main() -> None:
    """Train for the requested number of steps."""
    options = parse_arguments()
    rate, points = inner_lr(options), options.shots + options.queries
    tasks = options.tasks

    def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        amplitude, phase, positions = jax.random.split(key, 3)
        x = jax.random.uniform(positions, (points, 1), minval=-5.0, maxval=5.0)
        height = jax.random.uniform(amplitude, minval=0.1, maxval=5.0)
        return x, height * jnp.sin(x - jax.random.uniform(phase, maxval=jnp.pi))

    def error(parameters: list, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((predict(parameters, x) - y) ** 2)

    def query_error(parameters: list, x: jax.Array, y: jax.Array) -> jax.Array:
        support, query = slice(None, options.shots), slice(options.shots, None)
        for _ in range(options.inner_steps):
            gradients = jax.grad(error)(parameters, x[support], y[support])
            parameters = jax.tree.map(lambda p, g: p - rate * g, parameters, gradients)
        return error(parameters, x[query], y[query])

    @jax.jit
    def outer_step(parameters: list, mean: list, square: list, count: jax.Array) -> tuple:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), count), tasks)
        x, y = jax.vmap(sample)(keys)

        def batch_error(p: list) -> jax.Array:
            return jnp.mean(jax.vmap(query_error, (None, 0, 0))(p, x, y))

        loss, gradient = jax.value_and_grad(batch_error)(parameters)
        count = count + 1
        mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, mean, gradient)
        square = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g**2, square, gradient)

        def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            step = m / (1 - BETA1**count)
            return p - OUTER_LR * step / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)

        return jax.tree.map(updated, parameters, mean, square), mean, square, count, loss

    weights = [jnp.asarray(p.detach().numpy().T) for p in network(options).parameters()]
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, zeros, jnp.zeros((), jnp.int32))

    def one_step(state: tuple, _: None) -> tuple:
        *state, loss = outer_step(*state)
        return tuple(state), loss

    @jax.jit
    def outer_steps(*state: Any) -> tuple:
        return jax.lax.scan(one_step, state, length=options.steps_per_call)

    def step(iteration: int) -> float:
        nonlocal state
        if options.steps_per_call == 1:
            *state, loss = outer_step(*state)
            return float(loss)
        state, losses = outer_steps(*state)
        return jax.device_get(losses).tolist()[-1]

    options.tasks *= options.steps_per_call  # the tasks of a call
    print(measure(options, step))


if __name__ == "__main__":
    main()
