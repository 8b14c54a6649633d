"""Every error: its whole text, its builtin base, and its way through pickle."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from pathlib import Path

import pytest

from jaxsync import errors

EXAMPLES = [
    (
        errors.ConfigError(source="a.toml", problems=("unknown key 'axes': the nearest is 'axis'",)),
        ValueError,
        "Not a valid configuration: a.toml.\n"
        "  - unknown key 'axes': the nearest is 'axis'\n"
        "To fix it: correct what is listed above. `jaxsync.SyncConfig` documents the keys of the sync table; "
        "configs/digits.toml in the repository of jaxsync shows all keys of a job.",
    ),
    (
        errors.ConfigError(
            source="a.toml",
            problems=("cannot be read: No such file or directory",),
            kind="file",
            folder="/jobs",
        ),
        ValueError,
        "Not a valid configuration: a.toml.\n"
        "  - cannot be read: No such file or directory\n"
        "To fix it: give the path of a TOML file that is there and can be read; a.toml was looked for in the "
        "current folder, /jobs.",
    ),
    (
        errors.ConfigError(source="a.toml", problems=("cannot be read: Invalid value",), kind="toml"),
        ValueError,
        "Not a valid configuration: a.toml.\n"
        "  - cannot be read: Invalid value\n"
        "To fix it: correct the file at that place: it has to be TOML in UTF-8.",
    ),
    (
        errors.ArgumentError(
            function="make_train_step", argument="accumulate", got="0", wanted="an int of 1 or more"
        ),
        TypeError,
        "make_train_step got accumulate = 0; wanted an int of 1 or more.\n"
        "To fix it: see help(jaxsync.make_train_step) for what each argument is, and their order.",
    ),
    (
        errors.ArgumentError(
            function="TrainStep",
            argument="state",
            got="a dict",
            wanted="what step.init made",
            before="state = step.init(params)",
        ),
        TypeError,
        "TrainStep got state = a dict; wanted what step.init made.\n"
        "To fix it: first state = step.init(params); see help(jaxsync.TrainStep.__call__) for what each "
        "argument is, and their order.",
    ),
    (
        errors.MissingExtraError(feature="jaxsync train", package="optax", extra="train"),
        ImportError,
        "jaxsync train needs the package 'optax', which is not installed.\n"
        "To fix it: pip install 'jaxsync[train]'",
    ),
    (
        errors.BackendStartedError(
            asked=8, found="JAX has already started with 1 cpu device", causes=("module 'm' holds 'x'",)
        ),
        RuntimeError,
        "Cannot simulate 8 CPU devices: JAX has already started with 1 cpu device.\n"
        "  - module 'm' holds 'x'\n"
        "To fix it: call jaxsync.simulate_devices(n) once, before anything makes an array or lists devices, "
        "and restart the process (in Jupyter: the kernel). JAX_DEBUG_LOG_MODULES=jax._src.xla_bridge shows "
        "when the backend starts.",
    ),
    (
        errors.BackendStartedError(
            asked=8,
            found="jaxsync launch --devices-per-process has given this process 2",
            by_launcher=True,
        ),
        RuntimeError,
        "Cannot simulate 8 CPU devices: jaxsync launch --devices-per-process has given this process 2.\n"
        "To fix it: launch with --devices-per-process 8; or without it, and the script's own "
        "jaxsync.simulate_devices decides.",
    ),
    (
        errors.DeviceCountError(asked=8, found=1, platform="platform cpu"),
        RuntimeError,
        "The mesh needs 8 devices; JAX has 1 (platform cpu).\n"
        "To fix it: make a smaller mesh, or simulate the devices: jaxsync.simulate_devices(8) before the "
        "first use of JAX.",
    ),
    (
        errors.DeviceCountError(
            asked=8,
            found=0,
            platform="no platform",
            problem="a platform that is asked for is not there",
            causes=("JAX_PLATFORMS is 'cuda': unset it, or make it 'cpu'",),
        ),
        RuntimeError,
        "The mesh needs 8 devices; JAX cannot start: a platform that is asked for is not there.\n"
        "  - JAX_PLATFORMS is 'cuda': unset it, or make it 'cpu'\n"
        "To fix it: choose a platform that is there, before the first use of JAX; an accelerator needs JAX's "
        "plugin for it. For simulated devices: JAX_PLATFORMS=cpu, and jaxsync.simulate_devices(8).",
    ),
    (
        errors.DeviceCountError(asked=16, found=8, platform="platform cpu", simulated=8),
        RuntimeError,
        "The mesh needs 16 devices; JAX has 8 (platform cpu), since jaxsync.simulate_devices(8) was called.\n"
        "To fix it: make a smaller mesh; or restart the process (in Jupyter: the kernel), and simulate as "
        "many as the largest mesh needs: jaxsync.simulate_devices(16).",
    ),
    (
        errors.MeshError(
            mesh="data=8", problems=("axis 'data' has size 4 where sync_gradients is called, 8 in the plan",)
        ),
        ValueError,
        "The mesh (data=8) does not fit.\n"
        "  - axis 'data' has size 4 where sync_gradients is called, 8 in the plan\n"
        "To fix it: give the mesh named axes of one or more devices, make the plan for the mesh it runs on, "
        "and name the axes that carry the batch in SyncConfig(axis=...).",
    ),
    (
        errors.MeshError(
            mesh="batch=8",
            problems=("SyncConfig.axis names 'data', which the mesh does not have",),
            axes=("batch",),
            missing=("data",),
        ),
        ValueError,
        "The mesh (batch=8) does not fit.\n"
        "  - SyncConfig.axis names 'data', which the mesh does not have\n"
        'To fix it: make_plan(..., config=SyncConfig(axis="batch")), or call the axis of the mesh "data".',
    ),
    (
        errors.MeshError(
            mesh="x=4, y=2",
            problems=("SyncConfig.axis names 'data', which the mesh does not have",),
            axes=("x", "y"),
            missing=("data",),
        ),
        ValueError,
        "The mesh (x=4, y=2) does not fit.\n"
        "  - SyncConfig.axis names 'data', which the mesh does not have\n"
        'To fix it: make_plan(..., config=SyncConfig(axis="x")) (or whichever of "x", "y" carries the '
        'batch), or give the mesh an axis "data".',
    ),
    (
        errors.RegistrationError(leaves=(("['act']", "function"),)),
        ValueError,
        "1 leaf of the parameter tree cannot be synced: no array.\n"
        "  - params['act'] is a function\n"
        "To fix it: register arrays or jax.ShapeDtypeStructs only: wrap numbers in jnp.asarray, and take "
        "functions and strings out of the tree (equinox: eqx.filter(model, eqx.is_array)).",
    ),
    (
        errors.SpecError(leaves=(("['w']", "(3,)", "PartitionSpec('x',)", "the mesh has no axis 'x'"),)),
        ValueError,
        "1 partition spec does not fit.\n"
        "  - params['w'] (3,) with PartitionSpec('x',): the mesh has no axis 'x'\n"
        "To fix it: give each leaf a PartitionSpec of at most its rank, whose axes are in the mesh, used "
        "once, and whose sizes divide the dims; `specs` may be a prefix of the parameter tree.",
    ),
    (
        errors.DataShardedError(
            function="SyncClient", leaves=(("['w']", "PartitionSpec('data',)"),), axes=("data",)
        ),
        ValueError,
        "SyncClient holds parameters whole along the data axes ('data').\n"
        "  - params['w'] with PartitionSpec('data',)\n"
        "To fix it: shard parameters over data axes in a TrainStep with transform='shard_map', or in "
        "sync_gradients and value_and_grad; here replicate them: specs=jax.sharding.PartitionSpec().",
    ),
    (
        errors.ReplicaMismatchError(leaves=(("['w']", "TFRT_CPU_0", "TFRT_CPU_1"),)),
        ValueError,
        "The replicas of 1 array hold different values.\n"
        "  - params['w']: TFRT_CPU_0 and TFRT_CPU_1 differ\n"
        "To fix it: start every device from the same values: build the array from one host copy with "
        "jax.device_put(value, NamedSharding(mesh, spec)).",
    ),
    (
        errors.TreeMismatchError(problems=("grads['w'] is missing", "grads['v'] is not in the plan")),
        ValueError,
        "2 leaves do not fit the plan.\n"
        "  - grads['w'] is missing\n"
        "  - grads['v'] is not in the plan\n"
        "To fix it: pass the tree the plan was made for, with its shapes and dtypes; make a new plan when "
        "the parameters change.",
    ),
    (
        errors.UnboundAxisError(function="sync_gradients", axes=("data",)),
        NameError,
        "sync_gradients reduces over 'data', which is not bound here.\n"
        "To fix it: call it inside jax.shard_map over the plan's mesh, or inside jax.pmap(axis_name=...). "
        "Under plain jit on a sharded batch, gradients are global already and need no sync.",
    ),
    (
        errors.UnboundAxisError(function="sync_gradients", axes=("data",), bound=("batch",)),
        NameError,
        "sync_gradients reduces over 'data', which is not bound here; bound: 'batch'.\n"
        "To fix it: call the axis 'data' here too, as in jax.pmap(axis_name=...) or in the mesh of "
        "jax.shard_map; or make the plan for 'batch': the axis of its mesh, and SyncConfig(axis=...).",
    ),
    (
        errors.AlreadyReducedError(leaves=("['w']",), axes=("data",)),
        ValueError,
        "1 gradient is already reduced over 'data': to reduce again would multiply by the number of "
        "devices, silently.\n"
        "  - grads['w']\n"
        "To fix it: under shard_map(check_vma=True), jax.grad with respect to replicated parameters sums "
        "the gradients itself. Differentiate with jaxsync.value_and_grad(loss_fn, plan), which syncs too; "
        "or make the parameters varying before jax.grad: jax.lax.pcast(params, ('data',), to='varying'). "
        "Sync once only.",
    ),
    (
        errors.NotReducedError(function="global_norm", leaves=("['w']",), axes=("data",)),
        ValueError,
        "global_norm needs synced gradients; 1 gradient still varies over 'data', so each device would get "
        "another norm.\n"
        "  - grads['w']\n"
        "To fix it: sync first: jaxsync.sync_gradients(grads, plan), or put jaxsync.synchronize(plan) before "
        "it.",
    ),
    (
        errors.UncheckedModelError(axes=("model",), primitives=("psum",)),
        ValueError,
        "The loss communicates over 'model' (psum) without check_vma: JAX would multiply gradients by the "
        "size of that axis.\n"
        "To fix it: use jax.shard_map(..., check_vma=True), where gradients across a model axis are right; "
        "or wrap the communication in jax.custom_vjp with the backward rule you mean.",
    ),
    (
        errors.LossError(
            function="loss_fn (example.py:8)", got="float32[4]", wanted="a real float scalar loss"
        ),
        ValueError,
        "loss_fn (example.py:8) returned float32[4]; wanted a real float scalar loss.\n"
        "To fix it: return a real scalar, the mean over this device's rows. weighted=True: (loss, weight); "
        "has_aux=True: (loss, aux), or ((loss, weight), aux) with both.",
    ),
    (
        errors.NotElementwiseError(
            problems=(("updates", "['w']", "reduce_sum"), ("init.count", "", "depends on the shape")),
        ),
        ValueError,
        "shard_optimizer cannot divide this optimizer: its results are not elementwise.\n"
        "  - updates of params['w']: reduce_sum\n"
        "  - init.count: depends on the shape\n"
        "To fix it: use an elementwise optimizer (sgd, momentum, adam, adamw, lion, rmsprop, also with "
        "schedules, masks, inject_hyperparams and clipping by the global norm); or give this one to "
        "make_train_step as it is, with its state on every device.",
    ),
    (
        errors.DeletedArrayError(leaves=("state.params['w']",)),
        RuntimeError,
        "1 argument is an array deleted before.\n"
        "  - state.params['w']\n"
        "To fix it: a function that donates an argument reuses its memory: go on with what it returned, copy "
        "what must stay, or do not donate (make_train_step(..., donate=False)).",
    ),
    (
        errors.AliasedArrayError(leaves=(("state.params['a']", "state.params['b']"),)),
        ValueError,
        "A donated state holds the same array more than once; its memory can be reused only once.\n"
        "  - state.params['a'] is also state.params['b']\n"
        "To fix it: make the state with step.init(params), which copies; or copy one of each pair: "
        "jnp.copy(x).",
    ),
    (
        errors.BatchError(leaves=(("['x']", "(9, 3)", "9 rows are no multiple of 8"),), divisor=8),
        ValueError,
        "The batch cannot be divided into 8 equal parts (devices x accumulate).\n"
        "  - batch['x'] (9, 3): 9 rows are no multiple of 8\n"
        "To fix it: give every batch leaf the same number of rows, a multiple of 8; to keep all rows, pad "
        "the last batch and give the padding weight 0 with weighted=True.",
    ),
    (
        errors.DispatchError(asked="64", limit=32),
        ValueError,
        "max_in_flight=64 is not between 1 and 32 (on CPU).\n"
        "To fix it: leave it out (8 on CPU, no window on accelerators): more than 32 un-awaited programs "
        "with collectives abort the process on CPU.",
    ),
    (
        errors.ClosedError(
            function="Ticket.wait",
            pending=("TFRT_CPU_1 has not synced, nor handed over the gradients of ['w']",),
        ),
        RuntimeError,
        "Ticket.wait: the sync client is closed.\n"
        "  - TFRT_CPU_1 has not synced, nor handed over the gradients of ['w']\n"
        "To fix it: make a new client: jaxsync.start(mesh, config), or `with jaxsync.SyncClient(mesh, "
        "config)`.",
    ),
    (
        errors.StartConflictError(differences=("mesh: open with (data=4), asked for (data=8)",)),
        RuntimeError,
        "jaxsync.start was called before, and that client is still open, with other settings.\n"
        "  - mesh: open with (data=4), asked for (data=8)\n"
        "To fix it: close the first client before another start; or start with the same mesh and config.",
    ),
    (
        errors.NotRegisteredError(function="submit_gradient_sync"),
        RuntimeError,
        "submit_gradient_sync was called before any parameters were registered.\n"
        "To fix it: call client.register_sync_parameters(params) first.",
    ),
    (
        errors.UnknownNameError(kind="leaf", names=("['v']",), known=("['b']", "['w']")),
        LookupError,
        "There is no such leaf: ['v'].\n"
        "  - there is ['b']\n"
        "  - there is ['w']\n"
        "To fix it: name a device of the client's mesh (itself or its index), and leaves of the registered "
        "tree by their path, as jax.tree_util.keystr writes it.",
    ),
    (
        errors.DuplicateError(
            function="submit_gradient_sync", device="TFRT_CPU_1", step=3, leaves=("['w']",)
        ),
        ValueError,
        "submit_gradient_sync: TFRT_CPU_1 did that before in step 3.\n"
        "  - grads['w']\n"
        "To fix it: hand over each gradient once a step: add up several backward passes before, and end a "
        "step with client.submit_sync_collective(device).",
    ),
    (
        errors.DuplicateError(
            function="register_sync_parameters", device="TFRT_CPU_1", step=3, leaves=("['w']",)
        ),
        ValueError,
        "register_sync_parameters: TFRT_CPU_1 had handed over gradients of step 3; its announcement comes "
        "before the first of them.\n"
        "  - grads['w']\n"
        "To fix it: announce once a step, before the first gradient of the device; its next step begins "
        "after client.submit_sync_collective(device).",
    ),
    (
        errors.SubmissionError(device="TFRT_CPU_1", problems=("grads['w'] has shape (3,); wanted (2,)",)),
        ValueError,
        "Gradients of TFRT_CPU_1 cannot be synced.\n"
        "  - grads['w'] has shape (3,); wanted (2,)\n"
        "To fix it: hand over concrete arrays that live on that device alone, with the shape of its shard "
        "and the registered dtype: jax.device_put(grad, device).",
    ),
    (
        errors.TracedSubmissionError(function="submit_gradient_sync"),
        TypeError,
        "submit_gradient_sync was called with traced values, inside jit, grad, shard_map or pmap.\n"
        "To fix it: inside a traced function use jaxsync.sync_gradients(grads, plan); call the client with "
        "the arrays the function returned.",
    ),
    (
        errors.StepOverlapError(device="TFRT_CPU_1", step=3),
        RuntimeError,
        "TFRT_CPU_1 would start step 5 while step 3 is incomplete.\n"
        "To fix it: wait for the ticket of a step before the next but one: ticket.wait().",
    ),
    (
        errors.SetMismatchError(step=3, problems=("TFRT_CPU_0 announces ['w'], which TFRT_CPU_1 does not",)),
        ValueError,
        "Step 3: the devices do not announce the same leaves, so nothing was reduced.\n"
        "  - TFRT_CPU_0 announces ['w'], which TFRT_CPU_1 does not\n"
        "To fix it: announce the same tree on every device; a leaf that one device does not use gets a "
        "gradient of zeros there.",
    ),
    (
        errors.MissingGradientError(step=3, device="TFRT_CPU_1", leaves=("['w']",)),
        ValueError,
        "Step 3: TFRT_CPU_1 synced without 1 gradient.\n"
        "  - grads['w']\n"
        "To fix it: hand over every announced leaf before client.submit_sync_collective(device); or take "
        "unused ones for zero with SyncConfig(unused='zero').",
    ),
    (
        errors.SyncTimeoutError(
            step=3,
            timeout_s=60.0,
            owed=("TFRT_CPU_1 has not synced, nor handed over the gradients of ['w']",),
            events="at       event   step\n-------  ------  ----\n0.212 s  launch     2",
        ),
        TimeoutError,
        "Step 3 was not complete after 60 s.\n"
        "  - TFRT_CPU_1 has not synced, nor handed over the gradients of ['w']\n"
        "To fix it: see that every device reaches client.submit_sync_collective in every step; if one is "
        "only slow, raise SyncConfig(timeout_s=...).\n"
        "The last events:\n"
        "at       event   step\n"
        "-------  ------  ----\n"
        "0.212 s  launch     2",
    ),
    (
        errors.SyncTimeoutError(step=3, timeout_s=15.0, owed=()),
        TimeoutError,
        "Step 3 was not complete after 15 s.\n"
        "  - every device of this process has synced: a launched program did not finish; if it runs over "
        "several processes, another one may not have come to it\n"
        "To fix it: see that every process makes the same calls, with the same leaves, in the same order. "
        "With SyncConfig(timeout_s=...) above the collective_timeout_s of jaxsync.initialize, the processes "
        "can find out first in what they do not agree.",
    ),
    (
        errors.TicketTimeoutError(what_for="the sync of TFRT_CPU_0", timeout_s=0.5),
        TimeoutError,
        "No answer to the sync of TFRT_CPU_0 within 0.5 s; the ticket is still pending.\n"
        "To fix it: wait again, or longer; client.describe() says who and what is missing.",
    ),
    (
        errors.SyncFailedError(step=3, devices=("TFRT_CPU_1",), reason="OSError was raised"),
        RuntimeError,
        "Step 3 failed for all devices: OSError was raised.\n"
        "  - it came from TFRT_CPU_1\n"
        "To fix it: mend what the attached cause says, close the client, and start a new one.",
    ),
    (
        errors.CallbackError(callbacks=("log: OSError",)),
        RuntimeError,
        "1 deferred callback raised.\n"
        "  - log: OSError\n"
        "To fix it: mend the callback; its exception is attached as the cause.",
    ),
    (
        errors.WrongThreadError(function="close"),
        RuntimeError,
        "close on the loop's own thread, inside a callback, would never end.\n"
        "To fix it: let the callback only store or print, and do the rest on the thread that waits for its "
        "ticket.",
    ),
    (
        errors.ForkedProcessError(function="submit_gradient_sync"),
        RuntimeError,
        "submit_gradient_sync was called in a forked child of the process that started JAX.\n"
        "To fix it: start children with multiprocessing.get_context('spawn'), and make the client there.",
    ),
    (
        errors.LaunchError(command=("pyhton", "train.py"), process=0, reason="No such file or directory"),
        OSError,
        "Process 0 could not be started: pyhton: No such file or directory.\n"
        "To fix it: give the program and its arguments after `--`, as a shell would find them from here: "
        "`jaxsync launch -n 4 -- python train.py`.",
    ),
    (
        errors.LaunchError(kind="run_dir", run_dir="runs/a/restart-0", reason="Permission denied"),
        OSError,
        "No process was started: nothing can be recorded in runs/a/restart-0: Permission denied.\n"
        "To fix it: give --run-dir a directory that can be made and written to; or leave it out.",
    ),
    (
        errors.LaunchError(kind="options", problems=("num_processes = 0: wanted 1 or more",)),
        OSError,
        "No process was started: options that cannot be meant.\n"
        "  - num_processes = 0: wanted 1 or more\n"
        "To fix it: correct what is listed above; `jaxsync launch --help` says what each option is: "
        "`jaxsync launch -n 4 -- python train.py`.",
    ),
    (
        errors.InitializationError(reason="it was not called", is_launched=True),
        RuntimeError,
        "jaxsync.initialize: it was not called.\n"
        "To fix it: add jaxsync.initialize() at the top of the script, before anything makes an array or "
        "lists devices; jaxsync launch has set the rest.",
    ),
    (
        errors.InitializationError(
            reason="JAX has started its devices already", problems=("module 'm' holds the array 'x'",)
        ),
        RuntimeError,
        "jaxsync.initialize: JAX has started its devices already.\n"
        "  - module 'm' holds the array 'x'\n"
        "To fix it: call jaxsync.initialize once, before anything makes an array or lists devices: with one "
        "coordinator_address (a free port on the machine of process 0) and num_processes for all, and a "
        "process_id of its own for each; or with none of them, under a launcher that sets them.",
    ),
    (
        errors.AbsentProcessError(
            waited_for="jaxsync.initialize at 10.0.0.1:1234", missing=(2,), num_processes=4, timeout_s=60.0
        ),
        TimeoutError,
        "1 of 4 processes did not come to jaxsync.initialize at 10.0.0.1:1234 within 60 s.\n"
        "  - process 2 is missing\n"
        "To fix it: see in their logs whether they were started, ended early or take another way through the "
        "program: all processes must run the same calls in the same order. If they are only slow, raise the "
        "timeout: jaxsync.initialize(timeout_s=...).",
    ),
    (
        errors.AbsentProcessError(
            waited_for="the agreement on the training step", missing=(1,), num_processes=2, timeout_s=20.0
        ),
        TimeoutError,
        "1 of 2 processes did not come to the agreement on the training step within 20 s.\n"
        "  - process 1 is missing\n"
        "To fix it: see in their logs whether they were started, ended early or take another way through the "
        "program: all processes must run the same calls in the same order. If they are only slow, raise the "
        "timeout: jaxsync.initialize(collective_timeout_s=...).",
    ),
    (
        errors.PeerLostError(seen="its connection broke"),
        ConnectionError,
        "Another process is lost: its connection broke.\n"
        "To fix it: find the process whose log ends first, and start all processes anew, from the last "
        "checkpoint. If one was only slow, raise the timeouts: jaxsync.initialize(collective_timeout_s=...).",
    ),
    (
        errors.DisagreementError(
            subject="the parameters",
            differences=("leaf 0: ['b'] float32[2] P() in process 0; ['w'] float32[2] P() in process 1",),
        ),
        ValueError,
        "The processes do not agree on the parameters, so nothing was launched.\n"
        "  - leaf 0: ['b'] float32[2] P() in process 0; ['w'] float32[2] P() in process 1\n"
        "To fix it: run the same program, with the same versions, configuration and order of devices, in "
        "every process. A batch of host arrays is the whole batch, the same in all of them; for a process "
        "that has only its own rows: jax.make_array_from_process_local_data(sharding, rows).",
    ),
    (
        errors.DisagreementError(
            subject="the leaves of step 3",
            differences=("leaf ['b']: announced in process 0; none in process 1",),
            is_late=True,
        ),
        ValueError,
        "The processes do not agree on the leaves of step 3: some launched a program to which others never "
        "came.\n"
        "  - leaf ['b']: announced in process 0; none in process 1\n"
        "To fix it: run the same program, with the same versions, configuration and order of devices, in "
        "every process. A batch of host arrays is the whole batch, the same in all of them; for a process "
        "that has only its own rows: jax.make_array_from_process_local_data(sharding, rows).",
    ),
    (
        errors.ForeignDeviceError(function="submit_gradient_sync", device="TFRT_CPU_2", owner=1, process=0),
        ValueError,
        "submit_gradient_sync: TFRT_CPU_2 belongs to process 1, and this is process 0.\n"
        "To fix it: let each process act for its own devices only: those of mesh.devices.flat whose "
        "process_index is jax.process_index().",
    ),
    (
        errors.CheckpointReadError(
            directory="/runs/a",
            reason="there is no checkpoint in it",
            found=("there is 60.orbax-checkpoint-tmp, a save that was not finished",),
        ),
        OSError,
        "No checkpoint could be loaded from /runs/a: there is no checkpoint in it.\n"
        "  - there is 60.orbax-checkpoint-tmp, a save that was not finished\n"
        "To fix it: give the directory that save_checkpoint wrote to, and a number that "
        "jaxsync.list_checkpoints(directory) has; if one cannot be read, load the one before it.",
    ),
    (
        errors.CheckpointWriteError(
            directory="/runs/a",
            reason="this one is of step 40, which is not the newest",
            found=("there is 60",),
        ),
        OSError,
        "No checkpoint could be saved in /runs/a: this one is of step 40, which is not the newest.\n"
        "  - there is 60\n"
        "To fix it: give each run a directory of its own that can be written to and has room; to go back "
        "to an earlier step, go on in a new directory. The checkpoints that were there are as they were.",
    ),
    (
        errors.CheckpointMismatchError(
            path="/runs/a/60",
            saved_with="0123456789abcdef" * 4,
            loaded_with="fedcba9876543210" * 4,
            problems=("params['w'] is float32[3]; the checkpoint has float32[4]",),
        ),
        ValueError,
        "1 leaf does not fit: the checkpoint /runs/a/60 (plan 0123456789abcdef) is of another model or "
        "optimizer than the step (plan fedcba9876543210).\n"
        "  - params['w'] is float32[3]; the checkpoint has float32[4]\n"
        "To fix it: load it with a step whose parameters and optimizer have these leaves; only devices, "
        "mesh, specs and config may differ from those it was saved with.",
    ),
    (
        errors.GradientMismatchError(
            leaves=(("grads['w']", "ratio 4 = the number of devices (data=4): reduced twice"),),
            num_compared=3,
        ),
        AssertionError,
        "1 of 3 values differs from what one device computes.\n"
        "  - grads['w']: ratio 4 = the number of devices (data=4): reduced twice\n"
        "To fix it: reduce every gradient once, over the axes that carry the batch and no other: "
        "jaxsync.value_and_grad(loss_fn, plan) does. A ratio that is a number of devices comes most often "
        "from jax.grad with respect to replicated parameters under jax.shard_map: it sums over the devices "
        "itself, and pmean of that sum changes nothing. There make the parameters varying before jax.grad: "
        "jax.lax.pcast(params, axis, to='varying'). See that loss_fn, on one device, is the loss of the "
        "whole batch; if all is right but the rounding, pass rtol=.",
    ),
    (
        errors.ReplicasDifferError(leaves=(("['w']", "TFRT_CPU_0", "TFRT_CPU_3"),)),
        AssertionError,
        "The replicas of 1 array hold different values.\n"
        "  - tree['w']: TFRT_CPU_0 and TFRT_CPU_3 differ\n"
        "To fix it: reduce what devices add to, before it is returned with a replicated spec; keep "
        "check_vma=True, which refuses most of these; start every device from the same values, and decide "
        "(skip, clip, stop) by numbers that were reduced.",
    ),
    (
        errors.CollectiveCountError(problems=("all_reduce: has 2; wanted 1",), table="kind  axes"),
        AssertionError,
        "The compiled program does not have the collectives it should have.\n"
        "  - all_reduce: has 2; wanted 1\n"
        "To fix it: reduce once a step, outside loops, by bucket (jaxsync.sync_gradients); or, if the "
        "program is right, name every kind with its number.\n"
        "Its collectives:\n"
        "kind  axes",
    ),
    (
        errors.RecompiledError(functions=("jit(step)", "jit(add)", "jit(step)")),
        AssertionError,
        "3 programs were compiled inside no_recompile().\n"
        "  - jit(step), 2 times\n"
        "  - jit(add)\n"
        "To fix it: call everything once before the block (operations outside jit compile too), and keep "
        "shapes, dtypes, weak types and shardings as they were; make functions and meshes once, not in the "
        "loop. jax.config.update('jax_explain_cache_misses', True) tells what was new.",
    ),
    (
        errors.LeakError(
            leaks=("thread 'device-1' still runs: work (test_training.py:8)",),
            kinds=("threads",),
            others=("tickets", "arrays"),
        ),
        AssertionError,
        "The test left 1 thing behind.\n"
        "  - thread 'device-1' still runs: work (test_training.py:8)\n"
        "To fix it: join each thread. If it rightly stays, leave that check out, in pyproject.toml: "
        'jaxsync_leak_checks = ["tickets", "arrays"].',
    ),
    (
        errors.LeakError(leaks=("array float32[2] on TFRT_CPU_0", "thread 'device-1' still runs")),
        AssertionError,
        "The test left 2 things behind.\n"
        "  - array float32[2] on TFRT_CPU_0\n"
        "  - thread 'device-1' still runs\n"
        "To fix it: let every device sync and wait for its ticket; join each thread; keep no array in a "
        "global. If it rightly stays, leave these checks out, in pyproject.toml: jaxsync_leak_checks = [].",
    ),
    (
        errors.MeshMarkError(mesh="data=4, model=4", asked=16, found=8, platform="cpu"),
        AssertionError,
        "The mark mesh(data=4, model=4) needs 16 devices; JAX has 8 (cpu).\n"
        'To fix it: run pytest --jaxsync-devices=16, or set jaxsync_devices = "16" in pytest\'s '
        "configuration.",
    ),
    (
        errors.TooFewDevicesError(
            subject="sync_mesh", found=1, wanted=2, allow="mark the test with mesh(data=1)"
        ),
        AssertionError,
        "sync_mesh is on 1 device; wanted 2 or more, and one device shows nothing: no reduction can be wrong "
        "there.\n"
        'To fix it: run pytest --jaxsync-devices=8, or set jaxsync_devices = "8" in pytest\'s '
        "configuration, and use all devices; or, if so few are meant, mark the test with mesh(data=1).",
    ),
    (
        errors.FaultMissedError(faults=("Drop of sync by device 1 in step 3",)),
        AssertionError,
        "1 injected fault never struck.\n"
        "  - Drop of sync by device 1 in step 3\n"
        "To fix it: use the client that inject_faults gives in place of the other, and count steps from 0 at "
        "the beginning of the block, for each device.",
    ),
    (
        errors.RunReadError(
            directory="/runs/a",
            reason="run.json cannot be read: No such file or directory",
            found=("there is steps.jsonl",),
        ),
        OSError,
        "No run could be read from /runs/a: run.json cannot be read: No such file or directory.\n"
        "  - there is steps.jsonl\n"
        "To fix it: give the directory of a run: what `jaxsync train CONFIG --run-dir DIR` or "
        "jaxsync.run_log.RunLog wrote to. A line of steps.jsonl that is damaged can be deleted; run.json "
        "cannot be mended.",
    ),
    (
        errors.RunWriteError(directory="/runs/a", reason="there is a run in it"),
        OSError,
        "The run cannot be written to /runs/a: there is a run in it.\n"
        "To fix it: give each run a directory of its own that can be written to and has room (--run-dir "
        "DIR). To go on with the run that is there: `jaxsync train` with its --checkpoints DIR and --resume, "
        "or in a program of your own RunLog.open(directory, header, resume=True).",
    ),
    (
        errors.ReportWriteError(file="a/run.html", reason="No such file or directory"),
        OSError,
        "The report cannot be written to a/run.html: No such file or directory.\n"
        "To fix it: name a file in a folder that exists and can be written to.",
    ),
    (
        errors.SubjectError(reference="model:make", problem="there is no module 'model'"),
        ValueError,
        "'model:make' cannot be audited: there is no module 'model'.\n"
        "To fix it: name a function as package.module:function. It takes no arguments and returns "
        "(fn, *args): a step and the arguments to compile it for. Its module is looked for in the current "
        "folder, and where Python looks (PYTHONPATH).",
    ),
]
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.JaxsyncError) and value is not errors.JaxsyncError
]


def test_every_class_has_an_example() -> None:
    assert {type(error) for error, _, _ in EXAMPLES} == set(CLASSES)


def test_every_class_is_exported_and_shows_where_it_is_imported_from() -> None:
    modules = [
        importlib.import_module(f"jaxsync.errors.{module.name}")
        for module in pkgutil.iter_modules(errors.__path__)
    ]
    written = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, errors.JaxsyncError)
    }
    assert written == {getattr(errors, name) for name in errors.__all__} == {errors.JaxsyncError, *CLASSES}
    assert {cls.__module__ for cls in written} == {"jaxsync.errors"}


def test_a_pickle_names_no_module_inside_the_package() -> None:
    named = [type(error).__name__ for error, _, _ in EXAMPLES if b"jaxsync.errors." in pickle.dumps(error)]
    assert named == []


@pytest.mark.parametrize(("error", "builtin", "text"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_text_is_what_where_and_what_to_do(error: errors.JaxsyncError, builtin: type, text: str) -> None:
    assert str(error) == text
    assert isinstance(error, builtin)


@pytest.mark.parametrize("error", [error for error, _, _ in EXAMPLES], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"]
)
def test_an_error_survives_a_journey(error: errors.JaxsyncError, travel: object) -> None:
    arrived = travel(error)  # type: ignore[operator]
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize(
    "travel",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deep"],
)
def test_the_notes_of_an_error_travel_with_it(travel: object) -> None:
    error = errors.NotRegisteredError(function="submit_gradient_sync")
    error.add_note("in worker 3")
    arrived = travel(error)  # type: ignore[operator]
    arrived.add_note("of job 7")
    assert arrived.__notes__ == ["in worker 3", "of job 7"]
    assert error.__notes__ == ["in worker 3"]


def test_eight_places_are_shown_and_the_rest_counted() -> None:
    lines = str(errors.TreeMismatchError(problems=tuple(f"leaf {i}" for i in range(20)))).splitlines()
    assert lines[8:10] == ["  - leaf 7", "  - and 12 more"]


@pytest.mark.parametrize(("error", "builtin", "text"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_the_docs_have_a_section_with_the_text_of_each_error(
    error: errors.JaxsyncError, builtin: type, text: str
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    section = page.split(f"## {type(error).__name__}\n")[1].split("\n## ")[0]
    assert f"```text\n{text}\n```" in section
    assert f"(`{builtin.__name__}`)" in section
    for part in ("**Meaning**", "**When**", "**Solutions**", "**Example**"):
        assert part in section


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_tree_in_the_docstring_names_each_error(cls: type) -> None:
    base = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    [line] = [line for line in (errors.__doc__ or "").splitlines() if f" {cls.__name__} " in line]
    assert f"({base.__name__})" in line
