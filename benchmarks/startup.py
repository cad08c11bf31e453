"""Start-up time that paceline adds to a program that imports torch, and time of `paceline --help`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

from common import options, report, spread

TORCH = "import torch"
PACELINE = "import torch, paceline; paceline.train"  # names load when they are used
IMPORT_BAR_S, HELP_BAR_S = 0.2, 0.5


def main() -> None:
    args = options(__doc__ or "", rounds=9).parse_args()
    command = Path(sys.executable).parent / "paceline"
    torch_s, paceline_s, help_s = [], [], []
    for _ in range(args.rounds + 1):  # the first fills the caches
        torch_s.append(seconds(sys.executable, "-c", TORCH))
        paceline_s.append(seconds(sys.executable, "-c", PACELINE))
        help_s.append(seconds(str(command), "--help"))
    added = spread([ours - torch for ours, torch in zip(paceline_s[1:], torch_s[1:], strict=True)])
    helped = spread(help_s[1:])
    report(
        "startup",
        args,
        {
            "bar": f"import at most {IMPORT_BAR_S} s beyond torch, --help at most {HELP_BAR_S} s, median wall clock",
            "import_torch_s": spread(torch_s[1:]),
            "import_torch_and_paceline_s": spread(paceline_s[1:]),
            "added_s": {**added, "meets_bar": added["median"] <= IMPORT_BAR_S},
            "help_s": {**helped, "meets_bar": helped["median"] <= HELP_BAR_S},
        },
    )


def seconds(*command: str) -> float:
    begun = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - begun


if __name__ == "__main__":
    main()
