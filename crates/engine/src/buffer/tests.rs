//! Tests of pieces, whoever takes and returns them.

use super::*;

/// Pieces are aligned, disjoint, refused when the budget is used up, and usable again once dropped.
#[test]
fn pieces_are_disjoint_and_return() {
    let arena = Arena::new(1 << 20, 1).unwrap();
    let mut held: Vec<PooledBuffer> = (0..256).map(|_| arena.reserve(4096, None).unwrap()).collect();
    assert_eq!(arena.in_use_bytes(), 1 << 20);
    assert_eq!(
        arena.reserve(1, None).unwrap_err(),
        ReadError::Overloaded {
            resource: Resource::Memory
        }
    );
    held.sort_by_key(|piece| piece.place(0, 0) as usize);
    for pair in held.windows(2) {
        assert_eq!(pair[0].place(0, 0) as usize % 4096, 0);
        assert!(pair[0].place(0, 0) as usize + pair[0].capacity <= pair[1].place(0, 0) as usize);
    }
    drop(held);
    assert_eq!(arena.in_use_bytes(), 0);
    assert_eq!(arena.reserve(1 << 20, None).unwrap().capacity, 1 << 20);
}

/// Small pieces that two cores have returned, and keep, are there for others: the whole arena can be had in one
/// piece, or in small ones elsewhere.
#[test]
fn what_cores_keep_is_free() {
    let arena = Arena::new(1 << 20, 2).unwrap();
    let pages =
        |bytes, count: usize| -> Vec<_> { (0..count).map(|_| arena.reserve(bytes, None).unwrap()).collect() };
    let kept = |core: usize| -> usize { arena.pools[core].kept().iter().map(Vec::len).sum() };
    cores::run_as(0, || {
        drop((
            pages(4096, 100),
            pages(8192, 4),
            pages(4096 * 16, 3),
            pages(4096 * 20, 1),
        ));
    });
    cores::run_as(1, || drop((pages(4096, 9), pages(4096 * 64, 1))));
    assert_eq!((kept(0), kept(1), kept(2)), (32 + 4 + 3, 10, 0));
    // Returned where it was made.
    let piece = cores::run_as(1, || arena.reserve(4096, None).unwrap());
    cores::run_as(0, || drop(piece));
    assert_eq!((kept(0), kept(1)), (32 + 4 + 3, 10));
    drop(arena.reserve(1 << 20, None).unwrap());
    assert_eq!((kept(0), kept(1), kept(2)), (0, 0, 0));
    cores::run_as(0, || drop(pages(4096, 100)));
    drop(pages(4096, 256));
    assert_eq!(arena.in_use_bytes(), 0);
}

/// Four cores take and return single pages of an arena of two pages, whenever its budget has one. Expectation: then
/// there is a page, wherever it was kept.
#[test]
fn what_the_budget_has_is_found() {
    let arena = Arena::new(2 * PAGE_BYTES, 4).unwrap();
    let take_often = || {
        for _ in 0..200_000 {
            if let Ok(charge) = arena.charge(PAGE_BYTES, None) {
                drop(arena.cut(PAGE_BYTES, charge).expect("a page"));
            }
        }
    };
    std::thread::scope(|scope| {
        for core in 0..4 {
            scope.spawn(move || cores::run_as(core, take_often));
        }
    });
    assert_eq!(arena.in_use_bytes(), 0);
}

/// All memory is taken in pieces of one size; then one at a time, at random, is dropped and another one taken; then single
/// pages are taken. Expectation: hardly any memory is lost to begin with, there is always room for another piece, and for
/// each page that the budget has.
#[test]
fn what_a_piece_leaves_is_room_for_another_of_its_size() {
    assert!(KEPT.iter().all(|(pages, _)| rounding_bytes(*pages) == 0));
    let arena = Arena::new(16 << 20, 1).unwrap();
    let mut random = fastrand::Rng::with_seed(4);
    for pages in [1, 7, 9, 16, 17, 25, 31, 33, 65, 100, 257] {
        let bytes = pages * PAGE_BYTES;
        let mut held = Vec::new();
        while let Ok(piece) = arena.reserve(bytes, None) {
            held.push(piece);
        }
        // At most a ninth is lost to rounding, and less than one piece at the end.
        assert!(held.len() as u64 + 1 >= 4096 / pages * 8 / 9, "{pages} pages");
        for _ in 0..1000 {
            held.swap_remove(random.usize(..held.len()));
            held.push(arena.reserve(bytes, None).expect("room"));
        }
        let left = (arena.budget_bytes() - arena.in_use_bytes()) / PAGE_BYTES;
        held.extend((0..left).map(|_| arena.reserve(1, None).expect("a page")));
        drop(held);
        assert_eq!(arena.in_use_bytes(), 0);
    }
}

/// A scrape with one piece handed out shows its pages and the budget; once it is dropped, none.
#[test]
fn a_scrape_shows_what_is_in_use() {
    let arena = Arena::new(1 << 20, 1).unwrap();
    let registry = Registry::new();
    arena.register_metrics(&registry).unwrap();
    let scrape = || {
        prometheus::TextEncoder::new()
            .encode_to_string(&registry.gather())
            .unwrap()
    };
    let held = arena.reserve(5000, None).unwrap();
    let text = scrape();
    assert!(text.contains("ringfetch_memory_in_use_bytes 8192\n"), "{text}");
    assert!(text.contains("ringfetch_memory_budget_bytes 1048576\n"), "{text}");
    drop(held);
    let text = scrape();
    assert!(text.contains("ringfetch_memory_in_use_bytes 0\n"), "{text}");
}

/// A share refuses what is over its limit, naming itself, and is credited when the bytes made from it are
/// dropped.
#[test]
fn a_share_is_charged_until_the_last_slice_is_gone() {
    let arena = Arena::new(1 << 20, 1).unwrap();
    let share = arena.budget().caller().connection(8192);
    let mut buffer = arena.reserve(5000, Some(&share)).unwrap();
    assert_eq!(share.held(), 8192);
    assert_eq!(
        arena.reserve(1, Some(&share)).unwrap_err(),
        ReadError::Overloaded {
            resource: Resource::ConnectionMemory
        }
    );
    buffer.set_visible(0..5000);
    let bytes = buffer.into_bytes();
    let slice = bytes.slice(10..20);
    drop(bytes);
    assert_eq!(share.held(), 8192);
    drop(slice);
    assert_eq!(share.held(), 0);
    assert_eq!(arena.in_use_bytes(), 0);
}

/// A response and its scratch memory are reserved together, or neither; each piece is returned on its
/// own.
#[test]
fn two_pieces_are_reserved_together_or_not_at_all() {
    let arena = Arena::new(1 << 20, 1).unwrap();
    let share = arena.budget().caller().connection(512 << 10);
    let [data, scratch] = arena.reserve_both([256 << 10, 256 << 10], Some(&share)).unwrap();
    assert_eq!(share.held(), 512 << 10);
    drop(scratch);
    assert_eq!(share.held(), 256 << 10);
    assert!(arena.reserve_both([4096, 512 << 10], Some(&share)).is_err());
    drop(data);
    assert_eq!((share.held(), arena.in_use_bytes()), (0, 0));
    let [none, scratch] = arena.reserve_both([0, 1], Some(&share)).unwrap();
    assert!(none.is_none() && scratch.is_some());
    assert_eq!(share.held(), 4096);
}
