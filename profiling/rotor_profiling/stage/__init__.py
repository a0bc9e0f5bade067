"""What one stage costs, and which stages cost the same."""
