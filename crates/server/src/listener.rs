//! Accepts connections and hands each to the core with the fewest, where hyper serves it.
