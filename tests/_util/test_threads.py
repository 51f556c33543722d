"""Tasks in threads: results in the order of their arguments."""

from concurrent.futures import Future

from rankfeed._util.threads import DaemonPool, run_ahead


def test_results_have_the_order_of_the_arguments_and_only_some_are_submitted_ahead() -> None:
    pool = DaemonPool(2, "example")
    submitted: list[list[int]] = []

    def submit(numbers: list[int]) -> Future[int]:
        submitted.append(numbers)
        return pool.submit(sum, numbers)

    arguments = [[number] * 2 for number in range(9)]
    results = run_ahead(arguments, submit, depth=3)
    assert next(results) == 0
    assert len(submitted) == 4
    assert list(results) == [2, 4, 6, 8, 10, 12, 14, 16]
    pool.close()
