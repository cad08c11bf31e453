"""Every protocol of the catalogue, with the knobs that the table of docs/design.md gives it; k=3, lead=2, r=3."""

from math import inf

from paceline.catalogue import (
    asp,
    backup,
    bsp,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    pull,
    ringmaster,
    ssp,
)

# name in the catalogue, protocol, (quorum, max_staleness, refill, on_update, max_lead)
TABLE = [
    ("bsp", bsp(), ("all", 0, "update", "finish", inf)),
    ("backup", backup(k=3), (3, 0, "update", "finish", inf)),
    ("k_sync", k_sync(k=3), (3, 0, "update", "interrupt", inf)),
    ("pull", pull(k=3), (3, 0, "arrival", "finish", inf)),
    ("k_batch_sync", k_batch_sync(k=3), (3, 0, "arrival", "interrupt", inf)),
    ("k_async", k_async(k=3), (3, inf, "update", "finish", inf)),
    ("k_batch_async", k_batch_async(k=3), (3, inf, "arrival", "finish", inf)),
    ("asp", asp(), (1, inf, "arrival", "finish", inf)),
    ("ssp", ssp(lead=2), (1, inf, "arrival", "finish", 2)),
    ("ringmaster", ringmaster(r=3), (1, 2, "arrival", "finish", inf)),
    ("ringmaster", ringmaster(r=3, stops=True), (1, 2, "arrival", "interrupt", inf)),
]
