"""Device side: buckets, batch packing, step programs, sampler, memory sizing, mesh."""
