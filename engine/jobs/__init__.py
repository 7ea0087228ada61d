"""Operations on a job: prepare, check, evaluate, predict, export.

build        builds module, data and Trainer of a job
check        everything that is wrong with a job, found without training: `midstride check`
evaluate     evaluate weights on a job's test data, in one process: every sample once
export_weights  a run's weights in a format of other programs: safetensors, torch.export, ONNX, `from_pretrained`
operations   operations on a run that need torch or the user's code, each done in a process of its own
portability  what of a job would not hold elsewhere: in another folder and another process, as a deployment
             starts it
predict      predictions of a run's weights, written into one file as columns
prepare      data made once, with a manifest that tells later whether they are still there
script       the script of a job, run in this process: its `Loop` trains
publish      tell the trackers of a job whose weights are in charge, in a process that their libraries cannot
             harm

Tests: tests/unit/jobs
"""
