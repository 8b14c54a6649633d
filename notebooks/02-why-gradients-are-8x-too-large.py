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
# # Why gradients are 8x too large
#
# You move a training step from `pmap` to `shard_map`, keep its `pmean(grads)`, and training falls apart.
# Or worse, it does not, and is only a little bad. Nothing has warned you. The gradients are too large by
# exactly the number of devices. This notebook shows where the factor comes from, and how to see it.
#
# It needs `pip install 'jaxsync[notebook]'`; in a checkout `pip install '.[notebook]'`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxsync

jaxsync.simulate_devices(8)

# %% [markdown]
# ## A gradient you can do in your head
#
# Four devices with two rows each, one weight, and a loss whose gradient is the sum of the rows. The rows
# are 0, 1, ..., 7. So the sum over devices must be **28**, and the mean over four devices **7**.

# %%
mesh = jaxsync.make_mesh({"data": 4})
w, rows = jnp.float32(1), np.arange(8, dtype=np.float32)


def loss_fn(w, rows):
    return jnp.sum(w * rows)


def on_devices(fn, **kwargs):
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(fn, mesh=mesh, **specs, **kwargs))


# %% [markdown]
# The step as everybody writes it: differentiate on each device, then sum, or average. Here in three ways
# that look as if they were the same: `shard_map`; `shard_map` that does not check types; `pmap`.


# %%
def summed(w, rows):
    return jax.lax.psum(jax.grad(loss_fn)(w, rows), "data")


def averaged(w, rows):
    return jax.lax.pmean(jax.grad(loss_fn)(w, rows), "data")


def on_pmap(fn):
    run = jax.pmap(fn, axis_name="data", in_axes=(None, 0), devices=mesh.devices.flat)
    return lambda w, rows: run(w, rows.reshape(4, 2))[0]


found = {
    "truth": (28.0, 7.0),
    "shard_map": tuple(float(on_devices(fn)(w, rows)) for fn in (summed, averaged)),
    "shard_map(check_vma=False)": tuple(
        float(on_devices(fn, check_vma=False)(w, rows)) for fn in (summed, averaged)
    ),
    "pmap": tuple(float(on_pmap(fn)(w, rows)) for fn in (summed, averaged)),
}
for name, (total, mean) in found.items():
    print(f"{name:27} psum {total:5.0f}   pmean {mean:4.0f}")

# %% [markdown]
# Look at the second line, which is `shard_map` as it is by default: 112 for 28, and 28 for 7. Four times
# too much, on four devices; and `pmean` gave the sum.
#
# ## What a type says
#
# Inside `shard_map` the type of a value says over which axes it *varies*, that is, may differ from device
# to device. Look at `{V:data}` in what follows.


# %%
def show_types(w, rows):
    varying_w = jax.lax.pcast(w, ("data",), to="varying")
    values = {
        "w": w,
        "rows": rows,
        "grad with respect to w": jax.grad(loss_fn)(w, rows),
        "grad with respect to varying w": jax.grad(loss_fn)(varying_w, rows),
    }
    for name, value in values.items():
        kind = jax.typeof(value)
        print(f"{name:31} {kind!s:18} varies over {set(kind.manual_axis_type.varying) or 'nothing'}")
    return jax.lax.psum(jax.grad(loss_fn)(varying_w, rows), "data")


from_varying = float(on_devices(show_types)(w, rows))
print(f"{'psum of the last one':31} {from_varying}")

# %% [markdown]
# `w` came in replicated (`P()`), so its type says: the same on all devices. Rows differ. The gradient
# with respect to `w` has the type of `w`: *the same on all devices*. How can it be, if every device has
# other rows? Because `jax.grad` has summed it already.
#
# It is no mistake. One `w` is used on four devices. The derivative of using a value in four places is the
# sum of four derivatives. In the program, JAX inserts a `pvary` where the one `w` meets the rows of each
# device; and the transpose of `pvary` is a `psum`. Find both in the program below, and then the second
# `psum`, which is ours.

# %%
program = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
print(jax.make_jaxpr(program)(w, rows))

# %% [markdown]
# Under `pmap` and `check_vma=False` there are no such types, so `jax.grad` cannot know, and leaves its
# result local. Hence the old convention: *differentiate, then `pmean`*. Code that follows it is right
# there, and wrong by the number of devices in a default `shard_map`.
#
# ## What it does to training
#
# A line through noisy points, on eight devices. With SGD the factor is a learning rate eight times as
# large. With Adam, which divides by the size of gradients, you see next to nothing; but clipping, weight
# decay and every threshold now mean something else.

# %%
mesh8 = jaxsync.make_mesh({"data": 8})
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype(np.float32)
batch = {
    "x": x,
    "y": x @ np.array([1, -2, 3, 0.5], np.float32) + 0.1 * rng.normal(size=64).astype(np.float32),
}
params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
plan = jaxsync.make_plan(params, mesh8)


def error_of(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def wrong(params, batch):
    return jax.lax.pmean(jax.value_and_grad(error_of)(params, batch), "data")


right = jaxsync.value_and_grad(error_of, plan)


def gradient_by(loss_and_grads):
    fn = jax.shard_map(loss_and_grads, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(fn)(params, batch)[1]["w"]


factor = gradient_by(wrong) / gradient_by(right)
print("wrong / right:", factor)

# %% [markdown]
# The factor is eight for every weight. Now train with both.


# %%
def train(loss_and_grads, optimizer, num_steps=40):
    @jaxsync.guard_dispatch
    @jax.jit
    @jax.shard_map(mesh=mesh8, in_specs=(P(), P(), P("data")), out_specs=P())
    def step(params, opt_state, batch):
        loss, grads = loss_and_grads(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    own, opt_state, losses = params, optimizer.init(params), []
    for _ in range(num_steps):
        own, opt_state, loss = step(own, opt_state, batch)
        losses.append(loss)
    return np.array(losses)


curves = {
    (name, kind): train(loss_and_grads, optimizer)
    for name, optimizer in {"SGD": optax.sgd(0.15), "Adam": optax.adam(0.15)}.items()
    for kind, loss_and_grads in {"jaxsync": right, "pmean of jax.grad": wrong}.items()
}

# %%
figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for panel, name in zip(panels, ("SGD", "Adam"), strict=True):
    panel.plot(curves[name, "jaxsync"], label="right", linewidth=3, color="tab:green")
    panel.plot(curves[name, "pmean of jax.grad"], "--", label="8x", color="tab:red")
    panel.set(title=name, xlabel="step", yscale="log")
panels[0].set_ylabel("loss")
panels[0].legend()
plt.show()

# %% [markdown]
# Left: a loss of ten to the thirtieth is hard to overlook. Right: two curves, one on the other. You would
# have shipped it.
#
# ## What jaxsync does
#
# `jaxsync.value_and_grad` makes the parameters varying before it differentiates, so that the local
# gradient reaches the one reduction. The same number comes out with types, without types, and under
# `pmap`:

# %%
config = jaxsync.SyncConfig(reduce="sum")
plans = [jaxsync.make_plan(w, mesh, config=config), jaxsync.make_plan(w, mesh)]
synced = [lambda w, rows, plan=plan: jaxsync.value_and_grad(loss_fn, plan)(w, rows)[1] for plan in plans]
ours = {
    "shard_map": [float(on_devices(fn)(w, rows)) for fn in synced],
    "shard_map(check_vma=False)": [float(on_devices(fn, check_vma=False)(w, rows)) for fn in synced],
    "pmap": [float(on_pmap(fn)(w, rows)) for fn in synced],
}
for name, (total, mean) in ours.items():
    print(f"{name:27} sum {total:3.0f}   mean {mean:2.0f}")

# %% [markdown]
# `jaxsync.sync_gradients` is given gradients, and cannot know how they came about. But their type tells.
# To divide once more would be a guess, so it refuses, and says what to do instead:

# %%
plan4 = jaxsync.make_plan({"w": w}, mesh)


def refused(w, rows):
    grads = jax.grad(lambda params: loss_fn(params["w"], rows))({"w": w})
    return jaxsync.sync_gradients(grads, plan4)["w"]


try:
    on_devices(refused)(w, rows)
except jaxsync.errors.AlreadyReducedError as error:
    refusal = str(error)
print(refusal)

# %% [markdown]
# And code that uses no jaxsync at all can be audited. The warning is read from the compiled program:

# %%
audit = jaxsync.audit(on_devices(summed), w, rows)
audit

# %% [markdown]
# ## The claims

# %%
assert found["shard_map"] == (112.0, 28.0)
assert found["shard_map(check_vma=False)"] == found["pmap"] == found["truth"] == (28.0, 7.0)
assert from_varying == 28.0
np.testing.assert_allclose(factor, 8, rtol=1e-5)
assert all(tuple(numbers) == found["truth"] for numbers in ours.values())
assert "grads['w']" in refusal
assert "already reduced over 'data'" in refusal
assert [warning.kind for warning in audit.warnings] == ["double"]
assert curves["SGD", "jaxsync"][-1] < 0.1
assert not curves["SGD", "pmean of jax.grad"][-1] < 1e3
