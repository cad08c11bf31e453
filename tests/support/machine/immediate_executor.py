"""Executor in place of the processes that prepare minibatches."""

from concurrent.futures import Future

from worker_threads import passed_on


class ImmediateExecutor:
    """Executor that carries out each task at once, in the thread that submits it.

    Args:
        workers: number of processes, 1.
        mp_context: not used.
        initializer: function to call before the first task.
        initargs: its arguments, which it receives as another process does.
    """

    def __init__(self, workers, mp_context, initializer, initargs):
        assert workers == 1
        self._initializer = initializer
        self._initargs = initargs
        self._is_initialized = False

    def submit(self, task, *arguments):
        if not self._is_initialized:
            self._initializer(*passed_on(self._initargs))
            self._is_initialized = True
        future = Future()
        future.set_result(task(*arguments))
        return future

    def shutdown(self, *, cancel_futures):
        pass
