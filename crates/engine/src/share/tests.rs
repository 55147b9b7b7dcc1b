use super::*;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// Takes pieces of `amount` until one is refused.
fn fill(share: &Arc<Share>, amount: u64) -> (Vec<Charge>, Refused) {
    let mut held = Vec::new();
    loop {
        match share.charge(amount) {
            Ok(charge) => held.push(charge),
            Err(refused) => return (held, refused),
        }
    }
}

#[test]
fn what_is_refused_has_nobody_else_refused() {
    // Scenario: one thread takes a whole budget and returns it, again and again, while another one asks for more than there is.
    // Expectation: the former gets it each time.
    let budget = Budget::new(100);
    let (is_on, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                assert!(budget.charge(101).is_err());
                is_on.store(true, Relaxed);
            }
        });
        while !is_on.load(Relaxed) {
            std::thread::yield_now();
        }
        let refused = (0..1_000_000).filter(|_| budget.charge(100).is_err()).count();
        is_over.store(true, Relaxed);
        refused
    });
    assert_eq!((refused, budget.used()), (0, 0));
}

#[test]
fn a_caller_alone_holds_a_third_and_leaves_room_for_others() {
    // 300 in all, charges of 1, greedy callers with eight connections each: the first stops at a third
    // plus what its connections may always hold, the next ones at the same fraction of the rest, and a
    // newcomer is served after all of them.
    let budget = Budget::new(300);
    let mut held = Vec::new();
    let mut free = 300;
    for _ in 0..4 {
        let caller = budget.caller();
        let connections: Vec<_> = (0..8).map(|_| caller.connection(u64::MAX)).collect();
        for connection in &connections {
            held.extend(fill(connection, 1).0);
        }
        assert!(
            caller.held() >= free / 4 && caller.held() <= free / 2,
            "{} of {free}",
            caller.held()
        );
        free -= caller.held();
    }
    assert!(budget.caller().connection(u64::MAX).charge(10).is_ok());
    drop(held);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_connection_that_holds_little_is_served_beside_greedy_ones_of_its_caller() {
    // 256 MiB; 1,000 connections of one caller take 1 MiB at a time as long as they can. Another
    // connection of the same caller still gets blocks, and one of another caller a response of 16 MiB.
    let mib = 1 << 20;
    let budget = Budget::new(256 * mib);
    let caller = budget.caller();
    let greedy: Vec<_> = (0..1000).map(|_| caller.connection(64 * mib)).collect();
    let held: Vec<_> = greedy.iter().map(|share| fill(share, mib)).collect();
    assert!(held.iter().all(|(_, refused)| *refused != Refused::Budget));
    let modest = caller.connection(64 * mib);
    let _blocks: Vec<_> = (0..8).map(|_| modest.charge(64 << 10).unwrap()).collect();
    assert!(budget.caller().connection(64 * mib).charge(16 * mib).is_ok());
}

#[test]
fn a_callers_own_limit_holds_over_all_its_connections_and_at_once() {
    // Scenario: 1,000 in all; a caller limited to 10 has 20 connections, which take 1 each; then the
    // limit drops below what is held, and rises. Expectation: ten are granted, then none until enough is
    // returned, then more; another caller is unaffected.
    let budget = Budget::new(1000);
    let caller = budget.caller();
    caller.set_most(10);
    let connections: Vec<_> = (0..20).map(|_| caller.connection(u64::MAX)).collect();
    let take = || {
        connections
            .iter()
            .filter_map(|share| share.charge(1).ok())
            .collect::<Vec<_>>()
    };
    let mut held = take();
    assert_eq!((held.len(), connections[0].most()), (10, 10));
    assert_eq!(connections[19].charge(1).unwrap_err(), Refused::CallerLimit);
    caller.set_most(4);
    held.truncate(4);
    assert!(take().is_empty());
    held.pop();
    assert_eq!(take().len(), 1);
    caller.set_most(6);
    held.extend(take());
    assert_eq!(caller.held(), 6);
    assert!(budget.caller().connection(u64::MAX).charge(300).is_ok());
}

#[test]
fn a_callers_own_limit_holds_for_charges_at_the_same_moment() {
    // Scenario: a caller may hold one, and two threads charge one and return it, again and again. Expectation: they never have one
    // each.
    let caller = Budget::new(1000).caller();
    caller.set_most(1);
    let (granted, most) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let share = caller.connection(1000);
                for _ in 0..500_000 {
                    if let Ok(charge) = share.charge(1) {
                        most.fetch_max(granted.fetch_add(1, SeqCst) + 1, Relaxed);
                        granted.fetch_sub(1, SeqCst);
                        drop(charge);
                    }
                }
            });
        }
    });
    assert_eq!((most.into_inner(), caller.held()), (1, 0));
}

#[test]
fn a_weight_is_at_least_one() {
    // Scenario: a weight of 0, and of 7. Expectation: 1, since rounds in which a caller gets nothing would not end; 7.
    let budget = Budget::new(1);
    let caller = CallerAccount::new(0, &budget, &budget);
    let connection = caller.connection(0, 1);
    let set = |weight| {
        caller.set_weight(weight);
        connection.weight().get()
    };
    assert_eq!([0, 7].map(set), [1, 7]);
}

#[test]
fn a_refusal_names_who_holds_too_much() {
    // 100 in all: more than there is, more than the connection's limit, and more than half of what is
    // free.
    let budget = Budget::new(100);
    let caller = budget.caller();
    let share = caller.connection(40);
    assert_eq!(share.most(), 40);
    assert_eq!(share.charge(101).unwrap_err(), Refused::Budget);
    assert_eq!(share.charge(41).unwrap_err(), Refused::Connection);
    let _first = share.charge(40).unwrap();
    let other = caller.connection(40);
    assert_eq!(other.charge(1).unwrap_err(), Refused::Caller);
    let charge = budget.charge(60).unwrap();
    assert_eq!(budget.charge(1).unwrap_err(), Refused::Budget);
    assert_eq!(budget.used(), 100);
    drop(charge);
    assert_eq!((budget.used(), caller.held(), share.held()), (40, 40, 40));
}

#[test]
fn the_most_can_be_had_at_once_and_in_pieces() {
    // Nothing else is held: a charge of `most` is granted, and so are charges that were held and
    // returned.
    let budget = Budget::new(1 << 20);
    let share = budget.caller().connection(u64::MAX);
    assert_eq!(share.most(), 1 << 19);
    let charge = share.charge(share.most()).unwrap();
    assert_eq!(share.held(), 1 << 19);
    drop(charge);
    assert_eq!(share.held(), 0);
    let (_held, refused) = fill(&share, 4096);
    assert_ne!(refused, Refused::Budget);
    assert!(share.held() >= (1 << 20) / 6, "{}", share.held());
}

#[test]
fn a_charge_can_be_corrected_when_its_holder_has_all_it_may() {
    // Scenario: a lone caller takes the most it can, and corrects the charge: to the same, to less, to
    // more. Expectation: the same and less are always granted, and what is returned is free; more is
    // granted up to the most, whatever the charge holds, and refused beyond it.
    let budget = Budget::new(4096);
    let share = budget.caller().connection(u64::MAX);
    let mut charge = share.charge(share.most()).expect("the most");
    assert_eq!(charge.resize(2048), Ok(()));
    assert_eq!((charge.amount(), budget.used(), share.held()), (2048, 2048, 2048));
    assert_eq!(charge.resize(2049), Err(Refused::Caller));
    assert_eq!((charge.amount(), budget.used(), share.held()), (0, 0, 0));
    assert_eq!(charge.resize(1300), Ok(()));
    assert_eq!(charge.resize(2048), Ok(()));
    assert_eq!(charge.resize(10), Ok(()));
    assert_eq!((charge.amount(), budget.used(), share.held()), (10, 10, 10));
    assert_eq!(charge.resize(1000), Ok(()));
    drop(charge);
    assert_eq!((budget.used(), share.held()), (0, 0));
}
