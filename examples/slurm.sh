#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=TERM@60

# Rank 0 is the first task. --no-kill keeps the job running when a node fails. --requeue restarts the job when rank 0's
# node fails.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PACELINE_TOKEN=$(paceline token)
export MASTER_ADDR PACELINE_TOKEN MASTER_PORT=29500

where="--out runs/digits"
if [ -e runs/digits/run.json ]; then where="--resume runs/digits"; fi

srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c "
  export RANK=\$SLURM_PROCID WORLD_SIZE=\$SLURM_NTASKS LOCAL_RANK=\$SLURM_LOCALID
  exec paceline train digits --protocol 'dbw()' --cluster 'torchrun(address=$MASTER_ADDR)' --stop epochs=30 $where"
