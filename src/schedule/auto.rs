//! The `auto` policy: no delay, in as few steps as possible.

use super::baft;
use super::capacity::Work;
use super::pace::{Pace, total};
use super::request::{MAX_CHUNKS, Request};
use super::stream::{Filled, stream};

/// Returns the fill with the least delay, then the fewest steps, then the fewest chunks, together with its pace.
///
/// The same paces and orders of destinations are tried whatever the windows are, and none delays more with longer
/// windows (see `stream`). If nothing fits in `max_steps` without a delay, a single step of BAFT's is tried as well,
/// whose uncut units may happen to fit better.
pub(super) fn fill(request: &Request<'_>, work: &Work) -> (Pace, Filled) {
    let orders = work.orders();
    let first = Pace::full(request.link, request.memory);
    let few = |pace: &Pace| work.chunks(pace) <= MAX_CHUNKS;
    let smaller = Pace::smaller(request.link, request.memory).into_iter().filter(few);
    let paces = [first].into_iter().chain(smaller);
    let streams = paces.flat_map(|pace| orders.iter().map(move |loads| (pace, loads)));
    let mut found: Vec<(Pace, Filled)> = streams
        .map(|(pace, loads)| {
            let mut filled = stream(loads, &work.intervals, &pace, request.max_steps);
            // The rest is spread over all steps that a version may take.
            filled.steps = if filled.rest.is_empty() { filled.steps } else { request.max_steps };
            (pace, filled)
        })
        .collect();
    if found.iter().all(|(_, filled)| !filled.rest.is_empty()) {
        found.push((first, baft::fill(work, &first, 1)));
    }
    let rank = |(pace, filled): &(Pace, Filled)| {
        let chunks: u64 = filled.loads().map(|load| pace.chunks(load.bytes)).sum();
        (delay(pace, filled), filled.steps, chunks)
    };
    let best = found.into_iter().min_by(|a, b| {
        let (a, b) = (rank(a), rank(b));
        a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2))
    });
    let Some(best) = best else { unreachable!("there is at least one pace and one order") };
    best
}

/// Seconds of the rest per step of a version.
pub(super) fn delay(pace: &Pace, filled: &Filled) -> f64 {
    total(filled.rest.iter().map(|load| pace.seconds(load.bytes))) / filled.steps.max(1) as f64
}
