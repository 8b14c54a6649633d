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
# # Sharded state: who holds what
#
# In plain data parallelism each device holds all parameters, and all of the optimizer's state: with Adam
# three times the parameters, eight times over on eight devices. All of them compute the same update. Two
# things can be divided instead, and either is one line:
#
# - the **optimizer's state** (ZeRO, stage 1): `shard_optimizer(tx, plan)`;
# - the **parameters too** (FSDP; ZeRO, stage 3): a spec that has the data axis.
#
# We look at what each device then holds, and check that the training is the same.
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
mesh = jaxsync.make_mesh({"data": 8})

# %% [markdown]
# ## One model, three ways
#
# The only differences are in `CHOICES`: a spec, and whether the optimizer is wrapped.

# %%
rng = np.random.default_rng(0)
params = {
    "w1": rng.normal(0, 0.1, (64, 512)).astype(np.float32),
    "b1": np.zeros(512, np.float32),
    "w2": rng.normal(0, 0.1, (512, 64)).astype(np.float32),
    "b2": np.zeros(64, np.float32),
}
inputs = rng.normal(size=(256, 64)).astype(np.float32)
batch = {"x": inputs, "y": np.sin(2 * inputs)}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - batch["y"]) ** 2)


CHOICES = {"replicated": (P(), False), "ZeRO-1": (P(), True), "FSDP": (P("data"), False)}


def make_step(specs, is_state_sharded):
    plan = jaxsync.make_plan(params, mesh, specs)
    tx = optax.adam(3e-3)
    return jaxsync.make_train_step(
        loss_fn, jaxsync.shard_optimizer(tx, plan) if is_state_sharded else tx, plan
    )


steps = {name: make_step(*choice) for name, choice in CHOICES.items()}
states = {name: step.init(params) for name, step in steps.items()}

# %% [markdown]
# ## Who holds what
#
# Each row is a device; the width is the whole of the training state, parameters and Adam's two moments.
# Coloured is what the device really holds, read from the arrays themselves (`addressable_shards`).
#
# Top: eight full rows. Middle: each array of the moments is a staircase, of which each device has its
# step. Bottom: all is cut like that. (The thin staircases are the biases.)


# %%
def parts_of(array):
    """For each device: where its part begins and ends, as shares of the array."""
    for shard in array.addressable_shards:
        cuts = [
            (index.start / size, index.stop / size)
            for index, size in zip(shard.index, array.shape, strict=True)
            if index.start is not None and index.stop - index.start < size
        ]
        yield shard.device.id, cuts[0] if cuts else (0.0, 1.0)


def arrays_of(state):
    adam = state.packed_opt_state[0]
    groups = {"parameters": state.packed_params, "first moment": adam.mu, "second moment": adam.nu}
    return {name: jax.tree.leaves(tree) for name, tree in groups.items()}


figure, panels = plt.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained")
for panel, (name, state) in zip(panels, states.items(), strict=True):
    offset = 0.0
    for color, (group, arrays) in zip(("C0", "C1", "C2"), arrays_of(state).items(), strict=True):
        for k, array in enumerate(arrays):
            kib = array.nbytes / 1024
            for device, (start, stop) in parts_of(array):
                panel.broken_barh(
                    [(offset + start * kib, (stop - start) * kib)],
                    (device - 0.4, 0.8),
                    color=color,
                    label=group if k == 0 and device == 0 else None,
                )
            offset += kib
    panel.set(title=name, ylabel="device", yticks=range(8), xlim=(0, offset))
    panel.invert_yaxis()
panels[-1].set_xlabel("KiB of training state")
figure.legend(*panels[0].get_legend_handles_labels(), ncols=3, loc="outside lower center", frameon=False)
plt.show()

# %% [markdown]
# ## Ask before you run
#
# All this is known before a single byte is allocated. `step.abstract_state()` has shapes and shardings in
# place of arrays. The compiled program then says what a device will need: *arguments* is what it holds
# between steps and its rows of the batch, *temporary* what a step needs on top, such as gathered
# parameters, gradients and activations.

# %%
abstract_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
memory, audits = {}, {}
for name, step in steps.items():
    compiled = step.lower(step.abstract_state(), abstract_batch).compile()
    memory[name] = compiled.memory_analysis()
    audits[name] = jaxsync.audit(step, step.abstract_state(), abstract_batch)
    print(
        f"{name:11} arguments {memory[name].argument_size_in_bytes / 1024:6.1f} KiB, "
        f"temporary {memory[name].temp_size_in_bytes / 1024:6.1f} KiB, {audits[name].counts}"
    )

# %% [markdown]
# The price is in the counts. One all-reduce becomes reduce-scatters (of gradients) and all-gathers (of
# parameters), one each for each bucket. An all-reduce is these two in one, so about as many bytes travel.
# (The loss, and the flag that says whether all gradients are finite, still need all-reduces, of a few
# bytes.)
#
# What is held of each group, in numbers:

# %%
held = {
    name: {
        group: sum(array.addressable_shards[0].data.nbytes for array in arrays)
        for group, arrays in arrays_of(state).items()
    }
    for name, state in states.items()
}
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
left = np.zeros(3)
for group in held["replicated"]:
    kib = np.array([held[name][group] / 1024 for name in held])
    axes.barh(list(held), kib, left=left, label=group)
    left += kib
for y, total in enumerate(left):
    axes.text(total + 8, y, f"{total:.0f} KiB", va="center")
axes.set(xlabel="KiB on one device", xlim=(0, left.max() * 1.15))
axes.invert_yaxis()
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## The same training
#
# Forty steps of each. Three curves; the markers are there because the lines lie on top of each other.

# %%
losses = {name: [] for name in steps}
for name, step in steps.items():
    for _ in range(40):
        states[name], metrics = step(states[name], batch)
        losses[name].append(metrics["loss"])
losses = {name: np.array(own) for name, own in losses.items()}

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for k, (name, own) in enumerate(losses.items()):
    axes.plot(own, "-" if k == 0 else "", marker=("", "o", "x")[k], markevery=(3 * k, 6), label=name)
axes.set(xlabel="step", ylabel="loss")
axes.legend()
plt.show()

# %% [markdown]
# ## The claims
#
# To the byte: ZeRO-1 leaves 1/8 of the optimizer's state on a device, FSDP 1/8 of the parameters as well.
# And the compiled program agrees.

# %%
whole = held["replicated"]
moments = ("first moment", "second moment")
assert all(8 * held["ZeRO-1"][group] == whole[group] for group in moments)
assert all(8 * held["FSDP"][group] == whole[group] for group in whole)
saved = {
    name: memory["replicated"].argument_size_in_bytes - memory[name].argument_size_in_bytes for name in memory
}
assert saved["ZeRO-1"] == 7 * sum(whole[group] for group in moments) / 8, saved
assert saved["FSDP"] == 7 * sum(whole.values()) / 8, saved
for name in ("ZeRO-1", "FSDP"):
    np.testing.assert_allclose(losses[name], losses["replicated"], rtol=1e-4)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        jax.device_get(states[name].params),
        jax.device_get(states["replicated"].params),
    )
