"""Driver of Ray: a server and two workers train in actors. `python driver.py FOLDER` writes the run to FOLDER."""

import sys

import paceline as pl

result = pl.train(
    pl.jobs.digits(),
    protocol="k_sync(k=1)",
    cluster=pl.Ray(workers=2),
    stop="epochs=4",
    out=f"{sys.argv[1]}/digits",
)
print(result)
