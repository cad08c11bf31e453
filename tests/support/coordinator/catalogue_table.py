"""Every protocol of the catalogue with its initial knobs, for k=3, lead=2, r=3."""

from math import inf

from paceline.catalogue.protocols import (
    adasync,
    asp,
    auto,
    b_dbw,
    backup,
    balanced,
    bsp,
    dbw,
    dssp,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    patient,
    pull,
    ringmaster,
    ssp,
)
from paceline.catalogue.serverless import all_reduce, dc_s3gd, local_sgd, s3gd

# name in the catalogue, protocol, (quorum, max_staleness, refill, on_update, max_lead)
TABLE = [
    ("auto", auto(), ("all", 0, "share", "finish", inf)),
    ("auto", auto(m=0), ("all", 0, "update", "finish", inf)),
    ("auto", auto(candidates=["bsp", "k_sync(k=2)"], price_of_switch_s=1.5), ("all", 0, "update", "finish", inf)),
    ("bsp", bsp(), ("all", 0, "update", "finish", inf)),
    ("balanced", balanced(), ("all", 0, "share", "finish", inf)),
    ("balanced", balanced(m=4, backups=False, batch="live"), ("all", 0, "share", "finish", inf)),
    ("balanced", balanced(m=8, leases=1), ("all", 0, "update", "finish", inf)),
    ("balanced", balanced(m=3, leases=1, max_share=2.0), ("all", 0, "update", "finish", inf)),
    ("backup", backup(k=3), (3, 0, "update", "finish", inf)),
    ("k_sync", k_sync(k=3), (3, 0, "update", "interrupt", inf)),
    ("pull", pull(k=3), (3, 0, "arrival", "finish", inf)),
    ("k_batch_sync", k_batch_sync(k=3), (3, 0, "arrival", "interrupt", inf)),
    ("k_async", k_async(k=3), (3, inf, "update", "finish", inf)),
    ("k_batch_async", k_batch_async(k=3), (3, inf, "arrival", "finish", inf)),
    ("asp", asp(), (1, inf, "arrival", "finish", inf)),
    ("ssp", ssp(lead=2), (1, inf, "arrival", "finish", 2)),
    ("dssp", dssp(lead=1, most=4), (1, inf, "arrival", "finish", 1)),
    ("ringmaster", ringmaster(r=3), (1, 2, "arrival", "finish", inf)),
    ("ringmaster", ringmaster(r=3, stops=True), (1, 2, "arrival", "interrupt", inf)),
    ("dbw", dbw(), ("all", 0, "update", "finish", inf)),
    ("dbw", dbw(base="k_sync", D=20, late=False, release_idle=True), ("all", 0, "update", "interrupt", inf)),
    ("dbw", dbw(base="k_batch_async", window=20, unobserved="upper"), ("all", inf, "arrival", "finish", inf)),
    ("b_dbw", b_dbw(), ("all", 0, "update", "finish", inf)),
    ("adasync", adasync(), (1, 0, "update", "interrupt", inf)),
    ("adasync", adasync(base="k_batch_async", K_0=2), (2, inf, "arrival", "finish", inf)),
    ("patient", patient(), ("all", 0, "update", "interrupt", inf)),
    ("patient", patient(base="pull"), ("all", 0, "arrival", "finish", inf)),
]

# Without a server: the coordinator receives one gradient of each worker per update.
WITHOUT_SERVER = [
    (name, protocol, ("all", 0, "update", "finish", inf))
    for name, protocol in [
        ("all_reduce", all_reduce()),
        ("local_sgd", local_sgd(H=4)),
        ("s3gd", s3gd()),
        ("dc_s3gd", dc_s3gd()),
        ("dc_s3gd", dc_s3gd(lambda0=0.4)),
    ]
]
