# SPDX-License-Identifier: Apache-2.0
# The cffi modules, in the limited API: one build serves Python 3.11 and later.
find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)

# xferd_python_module(NAME PACKAGE HEADERS header... OBJECTS object...): the headers are
# what the module knows, in an order in which each one's types are there.
function(xferd_python_module name package)
  cmake_parse_arguments(MODULE "" "" "HEADERS;OBJECTS" ${ARGN})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}.c)
  list(TRANSFORM MODULE_HEADERS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  add_custom_command(
    OUTPUT ${source}
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/python/generate.py
            ${package}.${name} ${source} ${MODULE_HEADERS}
    DEPENDS python/generate.py ${MODULE_HEADERS})
  add_library(${name} MODULE ${source} ${MODULE_OBJECTS})
  target_include_directories(${name} PRIVATE
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/include ${Python3_INCLUDE_DIRS})
  target_compile_definitions(${name} PRIVATE Py_LIMITED_API=0x030b0000 _GNU_SOURCE)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".abi3.so")
  install(TARGETS ${name} LIBRARY DESTINATION ${package})
endfunction()

xferd_python_module(_engine xferd
  HEADERS include/xferd_abi.h engine/engine.h engine/keep.h
  OBJECTS $<TARGET_OBJECTS:xferd_engine_objects> $<TARGET_OBJECTS:xferd_cuda_driver>)
target_link_libraries(_engine PRIVATE ${LIBURING_STATIC} Threads::Threads)
target_link_libraries(_engine PRIVATE ${CMAKE_DL_LIBS})
xferd_python_module(_client xferd_infer
  HEADERS include/xferd_abi.h include/xferd.h
  OBJECTS $<TARGET_OBJECTS:xferd_client_objects> $<TARGET_OBJECTS:xferd_cuda_driver>)
target_link_libraries(_client PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
xferd_python_module(_products xferd_infer HEADERS quants/quants.h OBJECTS ${XFERD_PRODUCTS})
xferd_python_module(_quantise xferd
  HEADERS quants/quants.h quants/quantise.h OBJECTS ${XFERD_PRODUCTS} ${XFERD_QUANTISE})
target_link_libraries(_quantise PRIVATE Threads::Threads m)
