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
# # One thread for each device
#
# Not all training is one compiled program. Here every device has a thread of its own, which computes
# gradients at its own pace and hands them over. A client on the host waits until all have come, adds them
# up, and answers everybody. First we watch it work, with one device slower than the others. Then a device
# goes missing, which is where such code usually hangs for ever.
#
# It needs `pip install 'jaxsync[notebook]'`; in a checkout `pip install '.[notebook]'`.

# %%
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import SVG

import jaxsync
from jaxsync.errors import SyncFailedError, SyncTimeoutError
from jaxsync.report.timeline import draw_timeline, make_spans

jaxsync.simulate_devices(4)
mesh = jaxsync.make_mesh({"data": 4})
devices = list(mesh.devices.flat)

# %% [markdown]
# ## The work of one device
#
# A small network. In every step each device has 512 rows of its own, and sums their losses. So the right
# gradient is the sum over devices: that of all 2,048 rows.

# %%
NUM_STEPS, NUM_ROWS = 6, 512
rng = np.random.default_rng(0)
params = {
    "w1": rng.normal(0, 0.1, (64, 512)).astype(np.float32),
    "b1": np.zeros(512, np.float32),
    "w2": rng.normal(0, 0.1, (512, 64)).astype(np.float32),
}
rows = rng.normal(size=(NUM_STEPS, len(devices), NUM_ROWS, 64)).astype(np.float32)


@jax.jit
def local_gradients(params, rows):
    def loss_fn(params):
        hidden = jnp.tanh(rows @ params["w1"] + params["b1"])
        return jnp.sum((hidden @ params["w2"] - rows) ** 2)

    return jax.grad(loss_fn)(params)


# %% [markdown]
# ## Four calls a step
#
# What follows is all that a thread says to the client. It *announces* the leaves of the coming step,
# hands over gradients as they appear (a leaf by its path, or a part of the tree), says that this was all,
# and waits on its **ticket**. Only the last call blocks.
#
# Device 3 is made slow: it computes its gradients five times over.


# %%
def work(client, index, step):
    device = devices[index]
    client.register_sync_parameters(params, device=device)
    local = jax.device_put((params, rows[step, index]), device)
    for _ in range(5 if index == 3 else 1):
        grads = jax.block_until_ready(local_gradients(*local))
    client.submit_gradient_sync(device, "['w2']", grads["w2"])
    client.submit_gradient_sync(device, {"w1": grads["w1"], "b1": grads["b1"]})
    ticket = client.submit_sync_collective(device)
    return ticket.wait()


def work_all_steps(index):
    return [work(client, index, step) for step in range(NUM_STEPS)]


config = jaxsync.SyncConfig(reduce="sum")
with jaxsync.SyncClient(mesh, config) as client, ThreadPoolExecutor(len(devices)) as pool:
    client.register_sync_parameters(params)
    results = list(pool.map(work_all_steps, range(len(devices))))
    events = json.loads(client.record())

print(len(results), "devices have", [len(own) for own in results], "answers each")

# %% [markdown]
# ## What happened
#
# The client keeps its last events. These are those of step 1. Whatever the order in which devices come,
# launches come after the last of them, and answers after the launches.

# %%
for event in events:
    if event.get("step") == 1:
        device = f"device {event['device']}" if "device" in event else "the loop"
        print(f"{event['at_s'] * 1e3:8.1f} ms  {device:9} {event['kind']:9} {event.get('what', '')}")

# %% [markdown]
# As a picture, without step 0, in which things are compiled. Grey: a device announces its leaves, and
# then computes. Orange: it has handed over all, and waits for the others. Look at device 3, which hardly
# ever waits: all wait for it.

# %%
later = [event for event in events if (event.get("step") or 0) > 0]
SVG(draw_timeline(make_spans(later)))

# %% [markdown]
# How long each device has waited, step by step. In synchronous training the slowest device sets the pace:
# what you see in this chart is computing time that the fast ones did not use.

# %%
waits = [span for span in make_spans(later) if span.kind == "wait"]
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for index in range(len(devices)):
    own = {dict(span.facts)["step"]: span.took_s * 1e3 for span in waits if span.track == f"device {index}"}
    axes.bar(np.array(list(own)) + 0.2 * (index - 1.5), own.values(), width=0.18, label=f"device {index}")
axes.set(xlabel="step", ylabel="waited (ms)")
axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)
plt.show()

# %% [markdown]
# ## A device goes missing
#
# Now device 2 does not come: its thread has died, say, and nobody has noticed. The other three do all
# they should. A step that is not complete after `timeout_s` fails for all; here after one second, by
# default after a minute. A warning comes before that. And while they wait, any thread may ask what for.

# %%
present = (0, 1, 3)
first_rows = {index: jax.device_put((params, rows[0, index]), devices[index]) for index in present}
gradients = {index: jax.block_until_ready(local_gradients(*first_rows[index])) for index in present}

config = jaxsync.SyncConfig(reduce="sum", timeout_s=1.0, stall_warning_s=0.5)
client = jaxsync.SyncClient(mesh, config)
client.register_sync_parameters(params)
all_wait = threading.Barrier(4, timeout=30)  # three devices, and this thread


def sync_and_wait(index):
    client.submit_gradient_sync(devices[index], gradients[index])
    ticket = client.submit_sync_collective(devices[index])
    all_wait.wait()
    try:
        return ticket.wait()
    except SyncTimeoutError as error:
        return error


with ThreadPoolExecutor(3) as pool:
    waiting = [pool.submit(sync_and_wait, index) for index in present]
    all_wait.wait()
    print(client.describe())
    errors = [future.result() for future in waiting]

# %% [markdown]
# Three threads, three errors, and each says who is missing and what it owes. Read the first two lines;
# the rest says what to do, and what happened last.

# %%
print(errors[0])

# %%
stalled = json.loads(client.record())
client.close()
SVG(draw_timeline(make_spans(stalled)))

# %% [markdown]
# In the picture: three devices have handed over at the very left. Then nothing, and no row for device 2.
# In red: the warning after half a second, and the failure after one.
#
# ## A device that knows it fails
#
# A thread that cannot go on need not make the others wait for the timeout. It hands over its exception,
# and everybody gets it as the cause of theirs, at once.

# %%
client = jaxsync.SyncClient(mesh, jaxsync.SyncConfig(reduce="sum"))  # would wait for a minute
client.register_sync_parameters(params)
tickets = []
for index in present:
    client.submit_gradient_sync(devices[index], gradients[index])
    tickets.append(client.submit_sync_collective(devices[index]))

start_s = time.monotonic()
client.abort(ValueError("the rows of device 2 cannot be read"), devices[2])
causes = []
for ticket in tickets:
    try:
        ticket.wait()
    except SyncFailedError as error:
        causes.append(error.__cause__)
        failed = error
print(f"after {(time.monotonic() - start_s) * 1e3:.1f} ms:\n\n{failed}\ncaused by {failed.__cause__!r}")
client.close()

# %% [markdown]
# ## The claims

# %%
for step in range(NUM_STEPS):
    truth = local_gradients(params, rows[step].reshape(-1, 64))
    for index, own in enumerate(results):
        synced = own[step]
        assert all(synced[name].devices() == {devices[index]} for name in params)
        for name in params:
            scale = float(jnp.abs(truth[name]).max())
            np.testing.assert_allclose(synced[name], truth[name], rtol=1e-3, atol=1e-5 * scale)
assert [type(error) for error in errors] == [SyncTimeoutError] * 3
assert all(f"{devices[2]} has not synced" in str(error) for error in errors)
assert len(causes) == 3
assert all(isinstance(cause, ValueError) for cause in causes)
