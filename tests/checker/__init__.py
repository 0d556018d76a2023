"""The history checker: what clients saw and what the stores hold, judged against the promises."""
