#!/bin/bash
# One process a node of SLURM: `sbatch experiments/launch/slurm.sh -m paradec_jax.cli train sft --model M --data F`.
# JAX finds the coordinator, the number of processes and its own in the variables of the step. Two minutes before the
# time limit scancel sends SIGTERM to the processes of the step (srun would end them, were it sent there): the run saves
# and ends with code 0, and the job is queued again.
#SBATCH --job-name=paradec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7  # else JAX gives each process of a step one GPU

stopped=
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
srun --kill-on-bad-exit=1 python "$@" &
step=$!
wait "$step"
code=$?
if [ "$stopped" ]; then # the trap ended the first wait
  wait "$step"
  code=$?
  [ "$code" -ne 0 ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
