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
# # The first sync, in five minutes
#
# A small network that reads handwritten digits, trained on eight devices. Each device sees an eighth of
# every batch, and after every step all of them must agree on the same gradients. At the end we check two
# claims:
#
# 1. the gradients of eight devices are those of one device on the whole batch, and
# 2. a step communicates once: one all-reduce, whatever the number of parameters.

# %% [markdown]
# ## Devices
#
# Eight CPU devices are simulated, so this runs anywhere. It must be said before JAX is used; run again,
# the cell does nothing. With accelerators, leave that line out: nothing else changes but the number.
#
# It needs `pip install 'jaxsync[notebook]'`; in a checkout `pip install '.[notebook]'`.

# %%
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxsync
from jaxsync.testing import assert_matches_single_device

jaxsync.simulate_devices(8)
mesh = jaxsync.make_mesh({"data": 8})
mesh

# %% [markdown]
# ## Data, parameters, loss
#
# None of this knows how many devices there are. The loss is the mean over the rows it is given: on one
# device that is the batch, on eight it is each device's part of it.

# %%
pixels, labels = load_digits(return_X_y=True)
images = (pixels / 16).astype(np.float32)
labels = labels.astype(np.int32)
print(images.shape, labels.shape)


# %%
def make_params(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "kernel": rng.normal(0, (2 / num_in) ** 0.5, (num_in, num_out)).astype(np.float32),
            "bias": np.zeros(num_out, np.float32),
        }
        for num_in, num_out in itertools.pairwise(sizes)
    ]


def logits_of(params, image):
    x = image
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def loss_fn(params, batch):
    logits = logits_of(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


params = make_params([64, 512, 32, 32, 10])

# %% [markdown]
# ## The plan
#
# A plan says what is synced, and how, before anything runs. It is data, and shows itself. Look at the
# picture: its area is bytes. The one large kernel travels alone, since to copy it into a buffer would
# cost more than it saves. The seven small leaves share one buffer, since on their own each of them would
# pay a fixed price.

# %%
plan = jaxsync.make_plan(params, mesh)
plan

# %% [markdown]
# ## Train
#
# `make_train_step` compiles forward pass, backward pass, sync and update into one program. The loop
# awaits nothing: losses stay on the devices until we look at them.

# %%
step = jaxsync.make_train_step(loss_fn, optax.adam(2e-3), plan)
state = step.init(params)


def batches(num_steps, num_rows=256, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        rows = rng.choice(len(labels), num_rows, replace=False)
        yield {"image": images[rows], "label": labels[rows]}


losses = []
for batch in batches(100):
    state, metrics = step(state, batch)
    losses.append(metrics["loss"])

accuracy = float(jnp.mean(logits_of(state.params, images).argmax(axis=1) == labels))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy:.1%} of the training images are told right")

# %% [markdown]
# ## The same on one device
#
# Plain JAX, the same batches. If the sync is right, its losses are the same. Look for two curves: you
# should see one, with dots on it.

# %%
optimizer = optax.adam(2e-3)


@jax.jit
def single_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


single_losses, single_params, opt_state = [], params, optimizer.init(params)
for batch in batches(100):
    single_params, opt_state, loss = single_step(single_params, opt_state, batch)
    single_losses.append(loss)

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(np.array(losses), label="8 devices")
axes.plot(range(0, 100, 4), np.array(single_losses)[::4], "o", markersize=4, label="1 device")
axes.set(xlabel="step", ylabel="loss", yscale="log")
axes.legend()
plt.show()

# %% [markdown]
# ## What the program communicates
#
# Do not take the plan's word for it. `audit` reads the compiled program: one all-reduce with two
# operands, the large kernel and the buffer. The loss rides in the buffer.

# %%
audit = jaxsync.audit(step, state, batch)
audit

# %% [markdown]
# ## The claims
#
# `assert_matches_single_device` takes the gradients that the step hands to its optimizer, and compares
# them with `jax.value_and_grad(loss_fn)` on one device. It belongs in the tests of your own training
# code.

# %%
assert_matches_single_device(loss_fn, params, batch, step)
assert audit.counts == {"all-reduce": 1}, audit.counts
assert audit.collectives[0].num_operands == len(plan.buckets) == 2
assert accuracy > 0.9
np.testing.assert_allclose(np.array(losses[:20]), np.array(single_losses[:20]), rtol=1e-3)

# %% [markdown]
# Next: [why gradients are 8x too large](02-why-gradients-are-8x-too-large.ipynb), which is what plain JAX
# does to you at this point.
