"""`PipelineSession`: stages of a pipeline, their copies and recoveries."""
