"""Fit the paper's testbed to its numbers for VGG-5: `python -m benchmarks.fit_testbed` prints speeds and residuals.

`reproduction.testbed` has the two fitted factors, and describes the fit.
"""

from __future__ import annotations

from reproduction.testbed import BOARD, SERVER, error, fitted_speeds, printed_epochs


def main() -> None:
    rows = printed_epochs()
    board, server = fitted_speeds(rows)
    print(f"{BOARD} at {board:.3f} of its speed, {SERVER} at {server:.3f}: off by {error(rows, board, server):.1%} rms")
    for row in rows:
        predicted, of = row.predicted_s(board, server), row.trial
        plan = f"P={of.plan[0]} N={of.plan[1]}" if of.plan else of.method
        where = f"{of.dataset}, {of.link}, {plan}"
        print(f"{where}: printed {row.seconds:.1f} s, predicted {predicted:.1f} s, {predicted / row.seconds:.2f}")


if __name__ == "__main__":
    main()
