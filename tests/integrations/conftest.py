"""Scripts of these tests, which need their frameworks to be imported."""

collect_ignore = ["ray_script.py", "ray_cluster_script.py"]
