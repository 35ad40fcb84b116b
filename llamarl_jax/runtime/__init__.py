"""What a person sees of a run: metrics, timeline, report, clock."""
