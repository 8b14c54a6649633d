"""What the calls of a client tell its loop, and what a refusal means to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxsync.callbacks import Deferred, name_callback
from jaxsync.errors import NotRegisteredError, SetMismatchError, StartConflictError
from jaxsync.exchange import Exchange, Promised
from jaxsync.host.messages import Defer, Message, Register, Submit, Sync
from jaxsync.host.state import State, open_step
from jaxsync.host.ticket import Ticket
from jaxsync.plan import SyncPlan, make_plan
from jaxsync.registration import Registered, Registration
from jaxsync.submission import Senders, shapes


class Calls:
    """The calls of one client, once it is known which device they are about.

    What a call brings is looked at with what is registered then. If something else is registered before the
    loop has the message, it is looked at again: as if the call had come after.

    Threading: as for `SyncClient`. What belongs to a message is kept under the loop's lock, before anybody
    can see that the message was taken.
    """

    def __init__(self, exchange: Exchange, registration: Registration, senders: Senders) -> None:
        self._exchange = exchange
        self._loop = exchange.loop
        self._registration = registration
        self._senders = senders

    def register(self, plan: SyncPlan) -> Registered:
        """Registers a plan, unless it is.

        Raises:
            StartConflictError: A step is open.
            JaxsyncError: As for `Consent.ask`; or what the client is broken by.
        """
        self._check_adopted(self._registration.adopt(plan, self._loop))
        return self._registration.now

    def announce(self, index: int, params: Any) -> None:
        """Announces the leaves of a device's coming step; registers them, if nothing is.

        Raises:
            RegistrationError: As for `shapes`.
            SetMismatchError: They are not as registered, or not what another device has announced.
            JaxsyncError: As for `register` and `make_plan`; or the message was refused.
        """
        self._check_adopted(self._registration.adopt_first(lambda: self._make_plan(params), self._loop))
        while not self._announce(index, params):
            pass

    def _make_plan(self, params: Any) -> SyncPlan:
        empty = self._registration.now.plan
        return make_plan(shapes(params), empty.mesh, config=empty.config)

    def _check_adopted(self, is_adopted: bool) -> None:
        """Says why parameters could not be registered."""
        if is_adopted:
            return
        state = self._loop.state
        if state.failure is not None:
            raise self._exchange.error(state.failure, "register_sync_parameters")
        raise StartConflictError(differences=(f"step {state.first} is open: other parameters must wait",))

    def _announce(self, index: int, params: Any) -> bool:
        registered = self._registration.current("register_sync_parameters")
        mask, problems = registered.intake.announced(params)
        if problems:
            name = self._senders.names[index]
            error = SetMismatchError(
                step=self._loop.state.first, problems=tuple(f"{name}: {problem}" for problem in problems)
            )
            self._exchange.fail(error)
            raise error
        message = Register(device=index, leaves=mask)
        commit = self._note("announce", index)
        return self._post(message, "register_sync_parameters", commit, index, registered)

    def submit(self, index: int, name_or_tree: Any, grad: Any) -> None:
        """Hands over gradients of a device.

        Raises:
            NotRegisteredError: Nothing has been registered.
            SubmissionError, UnknownNameError: As for `Intake.gradients`.
            JaxsyncError: The message was refused, or the client is broken.
        """
        while not self._submit(index, name_or_tree, grad):
            pass

    def _submit(self, index: int, name_or_tree: Any, grad: Any) -> bool:
        registered = self._registration.current("submit_gradient_sync")
        gradients = registered.intake.gradients(index, name_or_tree, grad)
        mask = sum(1 << leaf for leaf in gradients)

        def commit(state: State) -> None:
            self._exchange.reductions.keep(open_step(state, index) or 0, index, gradients)

        message = Submit(device=index, leaves=mask)
        return self._post(message, "submit_gradient_sync", commit, index, registered)

    def sync(self, index: int) -> Ticket[Any]:
        """Says that a device has handed over all of its step; returns the ticket for its result.

        Raises:
            NotRegisteredError: Nothing has been registered.
            JaxsyncError: The message was refused, or the client is broken.
        """
        number = self._exchange.next_number()
        ticket = self._ticket(f"the sync of {self._senders.names[index]}")
        while not self._sync(index, number, ticket):
            pass
        return ticket

    def _sync(self, index: int, number: int, ticket: Ticket[Any]) -> bool:
        registered = self._registration.current("submit_sync_collective")
        note = self._note("sync", index)

        def commit(state: State) -> None:
            note(state)
            self._exchange.promised[number] = Promised(ticket=ticket, registered=registered)

        message = Sync(device=index, ticket=number)
        return self._post(message, "submit_sync_collective", commit, index, registered)

    def defer(self, callback: Callable[..., Any], arrays: tuple[Any, ...]) -> Ticket[Any]:
        """Puts a callback in line; returns the ticket for what it returns.

        Raises:
            JaxsyncError: The client is broken.
        """
        number = self._exchange.next_number()
        ticket = self._ticket(f"the callback {name_callback(callback)}")
        promised = Promised(ticket=ticket, registered=self._registration.now)

        def commit(state: State) -> None:
            self._exchange.promised[number] = promised
            deferred = Deferred(number=number, ticket=ticket, callback=callback, arrays=arrays)
            self._exchange.callbacks.append(deferred)

        self._post(Defer(ticket=number), "defer", commit)
        self._loop.poke()
        return ticket

    def _post(
        self,
        message: Message,
        function: str,
        commit: Callable[[State], None],
        index: int = -1,
        registered: Registered | None = None,
    ) -> bool:
        """Tells the loop. Whether it took the message: not if something else than `registered` is by now."""
        refuse = self._loop.post(message, commit, None if registered is None else registered.setup)
        if refuse is None:  # the message may itself be what broke the step
            failure = self._loop.state.failure if isinstance(message, Register | Submit) else None
        elif refuse.reason == "setup" and registered is self._registration.now:
            raise NotRegisteredError(function=function)  # an interrupt struck while it was registered
        elif refuse.reason == "setup":
            return False
        else:
            failure = refuse.failure
        if failure is not None:  # who syncs or defers has a ticket for that
            raise self._exchange.error(failure, function)
        if refuse is not None:
            state = self._loop.state
            step = (open_step(state, index) if index >= 0 else None) or state.first
            explainer = self._registration.now.explainer if registered is None else registered.explainer
            raise explainer.refusal(refuse, function, index, step)
        return True

    def _note(self, kind: str, index: int) -> Callable[[State], None]:
        recorder = self._exchange.recorder
        return lambda state: recorder.record(kind, step=open_step(state, index), device=index)

    def _ticket(self, what: str) -> Ticket[Any]:
        return Ticket(what, poke=self._loop.poke, is_loop_thread=self._loop.is_loop_thread)
