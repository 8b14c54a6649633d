# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # jaxsync in 100 lines
#
# The whole idea, rebuilt in plain JAX: a plan that is data, gradients packed into few buffers, one
# reduction, gradients of *varying* parameters, microbatches that are added up before they are reduced,
# and a bound on how far a loop may run ahead of the devices. The library adds many kinds of leaves,
# shardings, optimizers, processes and errors to this, and no other idea.
#
# It needs `pip install 'jaxsync[notebook]'`; in a checkout `pip install '.[notebook]'`.

# %%
import collections
import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxsync  # for eight devices, and to compare with

jaxsync.simulate_devices(8)
mesh = jaxsync.make_mesh({"data": 8})

# %% [markdown]
# ## 1. A plan is data
#
# A collective has a fixed price for each array, and a copy has one for each byte. So small leaves are put
# together, and large ones go alone. Who goes with whom is decided here, once, from shapes. Nothing below
# decides anything.


# %%
@dataclasses.dataclass(frozen=True)
class Plan:
    treedef: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]  # of each leaf, in tree order
    shapes: tuple[tuple[int, ...], ...]
    buckets: tuple[tuple[int, ...], ...]  # the leaves that travel together


def make_plan(params, max_leaves=32, max_bytes=80_000):
    named, treedef = jax.tree_util.tree_flatten_with_path(params)
    groups = collections.defaultdict(list)
    for i, (_, leaf) in enumerate(named):
        is_small = leaf.nbytes <= max_bytes
        groups[leaf.dtype if is_small else i].append(i)  # a large leaf is a group of its own
    return Plan(
        treedef=treedef,
        paths=tuple(jax.tree_util.keystr(path) for path, _ in named),
        shapes=tuple(leaf.shape for _, leaf in named),
        buckets=tuple(
            tuple(group[start : start + max_leaves])
            for group in groups.values()
            for start in range(0, len(group), max_leaves)
        ),
    )


# %% [markdown]
# ## 2. Pack, and unpack
#
# A bucket becomes one flat array, and leaves are slices of it again.


# %%
def pack(leaves, bucket):
    if len(bucket) == 1:
        return leaves[bucket[0]]
    return jnp.concatenate([leaves[i].ravel() for i in bucket])


def unpack(array, bucket, shapes):
    if len(bucket) == 1:
        return {bucket[0]: array}
    parts, offset = {}, 0
    for i in bucket:
        size = math.prod(shapes[i])
        parts[i] = array[offset : offset + size].reshape(shapes[i])
        offset += size
    return parts


# %% [markdown]
# ## 3. One reduction
#
# All buckets, and whatever else is to be averaged, in one `psum`. XLA makes one all-reduce of it.
#
# Before that, a look at the types. A gradient that does not *vary* over the data axis is the same on all
# devices: somebody has summed it before. To reduce it again would be wrong by a factor of eight, and
# nobody would notice. ([Why](02-why-gradients-are-8x-too-large.ipynb).)


# %%
def check_local(leaves, plan):
    summed = [
        path
        for path, leaf in zip(plan.paths, leaves, strict=True)
        if "data" not in jax.typeof(leaf).manual_axis_type.varying
    ]
    if summed:
        raise ValueError(f"these gradients are reduced already: {', '.join(summed)}")


def sync(grads, plan, loss):
    leaves = plan.treedef.flatten_up_to(grads)
    check_local(leaves, plan)
    packed = [pack(leaves, bucket) for bucket in plan.buckets]
    num_devices = jax.lax.axis_size("data")
    *means, loss = [total / num_devices for total in jax.lax.psum([*packed, loss], "data")]
    synced = {}
    for array, bucket in zip(means, plan.buckets, strict=True):
        synced |= unpack(array, bucket, plan.shapes)
    return loss, plan.treedef.unflatten([synced[i] for i in range(len(leaves))])


# %% [markdown]
# ## 4. Local gradients
#
# Replicated parameters do not vary, and so `jax.grad` with respect to them is such a sum. They are made
# varying first: then each device gets the gradient of its own rows.
#
# Microbatches are for rows that do not fit all at once. Their gradients are added up on the device. The
# reduction comes after the loop, not in it: one a step, not one a microbatch.


# %%
def local_gradients(loss_fn, params, rows, num_microbatches):
    varying = jax.tree.map(lambda x: jax.lax.pcast(x, ("data",), to="varying"), params)
    run = jax.value_and_grad(loss_fn)
    if num_microbatches == 1:
        return run(varying, rows)
    parts = rows.reshape(num_microbatches, -1, *rows.shape[1:])

    def add(total, part):
        return jax.tree.map(jnp.add, total, run(varying, part)), None

    total, _ = jax.lax.scan(add, run(varying, parts[0]), parts[1:])
    return jax.tree.map(lambda x: x / num_microbatches, total)


def value_and_grad(loss_fn, plan, num_microbatches=1):
    def run(params, rows):
        loss, grads = local_gradients(loss_fn, params, rows, num_microbatches)
        return sync(grads, plan, loss)

    return run


# %% [markdown]
# ## 5. A bounded number of launches
#
# A call returns before its program has run. A loop that awaits nothing is soon hundreds of programs
# ahead, and on simulated devices that ends the process: each waiting collective holds a thread, and there
# are only so many. To wait for the result of eight calls ago costs nothing, since that one is finished
# anyway.


# %%
def bounded(fn, max_in_flight=8):
    in_flight = collections.deque()

    def call(*args):
        if len(in_flight) == max_in_flight:
            jax.block_until_ready(in_flight.popleft())
        *outputs, witness = fn(*args)
        in_flight.append(witness)
        return *outputs, witness

    return call


# %% [markdown]
# ## 6. A training step


# %%
def make_train_step(loss_fn, plan, learning_rate):
    def step(params, batch):
        loss, grads = value_and_grad(loss_fn, plan)(params, batch)
        return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), loss

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return bounded(jax.jit(jax.shard_map(step, mesh=mesh, **specs)))


# %% [markdown]
# That is all of it. Below it is used.
#
# ## A model of many small leaves
#
# Twelve layers: 24 leaves, half of them of 32 numbers. (At most 16 leaves a bucket, to see more than
# one.)

# %%
NUM_LAYERS, WIDTH = 12, 32
rng = np.random.default_rng(0)
params = [
    {
        "w": jnp.asarray(rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)), jnp.float32),
        "b": jnp.zeros(WIDTH),
    }
    for _ in range(NUM_LAYERS)
]
batch = jnp.asarray(rng.normal(size=(64, WIDTH)), jnp.float32)


def loss_fn(params, x):
    y = x
    for layer in params:
        y = jnp.tanh(y @ layer["w"] + layer["b"])
    return jnp.mean((y - 0.5 * x) ** 2)


plan = make_plan(params, max_leaves=16)
print(f"{len(plan.shapes)} leaves in {len(plan.buckets)} buckets of {[len(b) for b in plan.buckets]}")

step = make_train_step(loss_fn, plan, learning_rate=0.5)
trained, losses = params, []
for _ in range(60):  # awaits nothing
    trained, loss = step(trained, batch)
    losses.append(loss)
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# ## Leaf by leaf, or in buckets
#
# The same gradients, reduced in three ways: this notebook's, jaxsync's, and `pmean` of the tree, as it is
# usually written. All three compile to one all-reduce. Look at how many arrays it has.


# %%
def leaf_by_leaf(params, batch):
    varying = jax.tree.map(lambda x: jax.lax.pcast(x, ("data",), to="varying"), params)
    return jax.lax.pmean(jax.value_and_grad(loss_fn)(varying, batch), "data")


def on_devices(fn):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))


ways = {
    "leaf by leaf": on_devices(leaf_by_leaf),
    "these 100 lines": on_devices(value_and_grad(loss_fn, plan)),
    "jaxsync": on_devices(jaxsync.value_and_grad(loss_fn, jaxsync.make_plan(params, mesh))),
}
operands = {}
for name, fn in ways.items():
    collectives = jaxsync.audit(fn, params, batch).collectives
    operands[name] = sum(collective.num_operands for collective in collectives)
    print(f"{name:16} {len(collectives)} all-reduce, {operands[name]} operands")

# %% [markdown]
# And what that does to time: each call awaited, the three ways in turn, so that whatever else the
# computer does hits all of them alike. The bar is the median, each dot a call.

# %%
results = {name: fn(params, batch) for name, fn in ways.items()}  # compiles
times_ms = {name: [] for name in ways}
for _ in range(25):
    for name, fn in ways.items():
        start_s = time.perf_counter()
        jax.block_until_ready(fn(params, batch))
        times_ms[name].append((time.perf_counter() - start_s) * 1e3)

figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
panels[0].barh(list(operands), list(operands.values()), color="C0")
panels[0].bar_label(panels[0].containers[0], padding=3)
panels[0].set(xlabel="arrays in the all-reduce", xlim=(0, 1.15 * max(operands.values())))
for y, own in enumerate(times_ms.values()):
    panels[1].barh(y, np.median(own), color="C0", alpha=0.4)
    panels[1].plot(own, y + np.linspace(-0.25, 0.25, len(own)), "o", markersize=3, color="C0")
panels[1].set(
    xlabel="loss and gradients (ms)", xlim=(0, 1.2 * np.quantile(np.concatenate([*times_ms.values()]), 0.95))
)
panels[0].invert_yaxis()
plt.show()

# %% [markdown]
# ## The claims
#
# A sum over eight devices is the same, however leaves are put together. So, given the same local
# gradients, the result is that of jaxsync to the last bit. (Local gradients themselves may differ in the
# last bits between two programs, since XLA is free to fuse them in another way; so whole programs, and
# one device, agree up to rounding.)


# %%
stacked = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))(params, batch.reshape(8, 8, WIDTH))
their_plan = jaxsync.make_plan(params, mesh)


def synced_by(sync_fn):
    def run(own):
        return sync_fn(jax.tree.map(lambda x: x[0], own))

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))(stacked)


mine = synced_by(lambda grads: sync(grads, plan, loss=grads[0]["b"][0])[1])
theirs = synced_by(lambda grads: jaxsync.sync_gradients(grads, their_plan))
single = jax.jit(jax.value_and_grad(loss_fn))(params, batch)


def assert_close(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-7), one, other)


assert jax.tree.all(jax.tree.map(np.array_equal, mine, theirs))
for result in results.values():
    assert_close(jax.device_get(result), jax.device_get(single))
assert operands["leaf by leaf"] == len(plan.shapes) + 1
assert operands["these 100 lines"] == len(plan.buckets) + 1
assert losses[-1] < losses[0]

# %% [markdown]
# With four microbatches the gradients are the same, and there is still one reduction, which is not in the
# loop. And gradients that are summed already are refused.

# %%
in_four = on_devices(value_and_grad(loss_fn, plan, num_microbatches=4))
audit = jaxsync.audit(in_four, params, batch)
assert_close(jax.device_get(in_four(params, batch)), jax.device_get(single))
assert audit.counts == {"all-reduce": 1}
assert audit.in_loop == ()

try:
    on_devices(lambda params, rows: sync(jax.grad(loss_fn)(params, rows), plan, rows.sum()))(params, batch)
except ValueError as error:
    refusal = str(error)
assert refusal.startswith("these gradients are reduced already: [0]['b'], [0]['w'],"), refusal
