"""What a stage finds around it when it runs again, as it was the first time, each kind by itself."""
