"""What a run that ended or broke tells: report, curves, audit."""
