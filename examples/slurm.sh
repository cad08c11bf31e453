#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=TERM@60

# Each node has one task, `paceline run`, which starts a rank that dies again. --no-kill keeps the job running when a node
# fails. --requeue restarts the job when the first node fails, which has rank 0.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PACELINE_TOKEN=$(paceline token)
export PACELINE_TOKEN

where="--out runs/digits"
if [ -e runs/digits/run.json ]; then where="--resume runs/digits"; fi

srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c "
  exec paceline run --nnodes \$SLURM_NNODES --node-rank \$SLURM_NODEID --rdzv-endpoint $head:29500 \\
    -m paceline train digits --protocol 'dbw()' --cluster 'torchrun(address=$head)' --stop epochs=30 $where"
