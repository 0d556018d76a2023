"""The SDK: its decisions under a manual clock, its store on a real disk, and all of it over real TLS."""
